"""The compatibility layers in torchbagua/compat use only the public API of torchbagua, as user code does."""

import ast
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchbagua

COMPAT = Path(torchbagua.__file__).parent / "compat"
PUBLIC = [
    "torchbagua",
    *(f"torchbagua.{name}" for name in ("algorithms", "codecs", "collectives", "extend", "fsdp", "observe")),
]
OWN = "torchbagua.compat"


def is_own(module: str) -> bool:
    return module == OWN or module.startswith(f"{OWN}.")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@functools.cache
def public_names(module: str) -> set[str]:
    """Return the names that may be imported from a public package, or read as its attributes.

    These are its `__all__`, its re-exports in the form of type checkers (`import X as X`), and its public subpackages.
    """
    package = importlib.import_module(module)
    assert package.__file__ is not None
    aliases = [alias for node in ast.walk(ast.parse(Path(package.__file__).read_text()))
               if isinstance(node, ast.ImportFrom) for alias in node.names]  # fmt: skip
    names = {*package.__all__, *(alias.name for alias in aliases if alias.name == alias.asname)}
    return names | {public.rpartition(".")[2] for public in PUBLIC if public.rpartition(".")[0] == module}


def problem_of(module: str, name: str) -> str | None:
    if is_own(module) or is_own(f"{module}.{name}"):
        return None
    if module not in PUBLIC:
        return f"{module} is not public"
    return None if name in public_names(module) else f"{module}.{name} is not public"


def path_of(node: ast.expr) -> list[str]:
    """Return `a.b.c` as a list; empty if it does not begin with a name."""
    if isinstance(node, ast.Name):
        return [node.id]
    path = path_of(node.value) if isinstance(node, ast.Attribute) else []
    return [*path, node.attr] if path else []


def imports_of(tree: ast.AST) -> Iterator[tuple[int, str, str | None, str]]:
    """Yield the line, the module, the imported name or None, and the local name of each import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, None, alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            module = f"{'.' * node.level}{node.module or ''}"
            for alias in node.names:
                yield node.lineno, module, alias.name, alias.asname or alias.name


def private_names_of(tree: ast.AST) -> set[str]:
    """Return the private names that a source defines: functions, classes, and assigned names."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return set(filter(is_private, found))


def problems_of(source: str, own_names: set[str], *, may_use_torchs: bool = False) -> list[str]:
    """Return the accesses of a source of compat that user code must not make.

    Args:
        source: Python.
        own_names: the private names that compat defines.
        may_use_torchs: whether the source may use private names of torch.
    """
    tree = ast.parse(source)
    problems = []
    modules: dict[str, str] = {}  # public packages, by their names in the source
    core: set[str] = set()  # other names that are imported from there
    for line, module, name, alias in imports_of(tree):
        if module.startswith("."):
            problems.append(f"{line}: relative import of {name}")
        if module.partition(".")[0] != "torchbagua":
            continue
        if name is None:
            if not is_own(module) and module not in PUBLIC:
                problems.append(f"{line}: {module} is not public")
            modules[alias] = "torchbagua" if alias == "torchbagua" else module
        elif problem := problem_of(module, name):
            problems.append(f"{line}: {problem}")
        elif f"{module}.{name}" in PUBLIC:
            modules[alias] = f"{module}.{name}"
        elif not is_own(module):
            core.add(alias)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        first, *rest = path_of(node) or [""]
        module = modules.get(first)
        while module is not None and rest:
            if problem := problem_of(module, rest[0]):
                problems.append(f"{node.lineno}: {problem}")
            module, rest = f"{module}.{rest[0]}", rest[1:]
            module = module if module in PUBLIC else None
        is_of_core = first in modules or first in core
        if is_private(node.attr) and (is_of_core or not (may_use_torchs or node.attr in own_names)):
            problems.append(f"{node.lineno}: {ast.unparse(node)} is private")
    return problems


SOURCES = sorted(COMPAT.rglob("*.py"))
OWN_NAMES = set().union(*(private_names_of(ast.parse(path.read_text())) for path in SOURCES))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(COMPAT)))
def test_compat_uses_only_public_names(path: Path) -> None:
    assert problems_of(path.read_text(), OWN_NAMES, may_use_torchs=path.name == "_torch.py") == []


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("from torchbagua.runtime.bucket import BaguaBucket", "1: torchbagua.runtime.bucket is not public"),
        ("from torchbagua import runtime", "1: torchbagua.runtime is not public"),
        ("from torchbagua.algorithms import PLAIN_TYPES", "1: torchbagua.algorithms.PLAIN_TYPES is not public"),
        ("from ..runtime import lane", "1: relative import of lane"),
        ("import torchbagua\ntorchbagua.observe.events", "2: torchbagua.observe.events is not public"),
        ("from torchbagua import codecs\ncodecs.base.REGISTRY", "2: torchbagua.codecs.base is not public"),
        ("from torchbagua import attach\nattach._own", "2: attach._own is private"),
        ("def f(make):\n    make()._module", "2: make()._module is private"),
    ],
)
def test_private_names_are_found(source: str, problem: str) -> None:
    assert problem in problems_of(source, {"_own"})


def test_public_names_are_accepted() -> None:
    source = (
        "import torchbagua as tb\nfrom torchbagua import algorithms, observe\nfrom torchbagua.compat import bagua\n"
        "tb.observe.Summary, observe.Tracer, algorithms.get, tb.topology, tb.Attachment.detach, tb.__version__\n"
        "class Own(tb.Algorithm):\n    def f(self): self._own = self.__dict__\n"
    )
    assert problems_of(source, {"_own"}) == []
