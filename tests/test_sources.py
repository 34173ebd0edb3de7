"""Rules that the sources of the package follow, in addition to the import layers in pyproject.toml.

One test for each rule; it lists the files and lines that break it.
"""

import ast
import importlib
import re
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from source_tree import REPOSITORY
from test_reference import re_exports

PACKAGE = REPOSITORY / "torchbagua"
BELOW_TRAINING = ("algorithms", "runtime", "collectives", "transport", "codecs", "native", "observe")
SOURCES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def nodes_of(name: str) -> list[ast.AST]:
    """Return all nodes of a file of the package, the module first."""
    return list(ast.walk(ast.parse(SOURCES[name].read_text(encoding="utf-8"))))


def breaches(find: Callable[[str], Iterator[str]], *but: str) -> list[str]:
    """Return what a function finds in the sources, except for the files, or beginnings of paths, `but`."""
    names = [name for name in SOURCES if not name.startswith(but)]
    return [f"{name}: {breach}" for name in names for breach in find(name)]


# An object's attributes are assigned in the module of its class only: whoever reads the class sees every change.

# Integrations assign the attributes of other people's interfaces, and _torch.py torch's. C reads tensor_tables.py's.
OTHERS = ("integrations/", "testing/", "_torch.py", "compat/bagua/_torch.py", "native/tensor_tables.py")

# Attributes of torch's and Python's objects.
OF_TORCH_AND_PYTHON = {
    "atexit",
    "broadcast_buffers",
    "environ",
    "excepthook",
    "forward",
    "grad",
    "require_backward_grad_sync",
    "asyncOp",
    "step",
    "training",
}


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def own_attributes(nodes: list[ast.AST]) -> set[str]:
    """Return the attributes that the classes of a module have: assigned to `self`, annotated, or in the class."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            found.add(node.attr)
        for statement in node.body if isinstance(node, ast.ClassDef) else ():
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def foreign_assignments(name: str) -> Iterator[str]:
    allowed = own_attributes(nodes_of(name)) | OF_TORCH_AND_PYTHON
    for node in nodes_of(name):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            target, attribute = node.value, node.attr
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "setattr"
            and isinstance(node.args[1], ast.Constant)
        ):
            target, attribute = node.args[0], node.args[1].value
        else:
            continue
        if not is_self(target) and attribute not in allowed:
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_only_its_own_module_assigns_an_objects_attributes() -> None:
    assert breaches(foreign_assignments, *OTHERS) == []
    assert list(foreign_assignments("native/tensor_tables.py")), "it finds those of C's structures"


# Names that a package must not use: packages, the names, and excepted files, each with its reason.
CONTRACTS = {
    "codecs know no torch.distributed": (
        ("codecs", "native"),
        ("torch.distributed",),
        {},
    ),
    "only training and fsdp know DDP and FSDP2": (
        BELOW_TRAINING,
        ("DistributedDataParallel", "torch.nn.parallel", "torch.distributed.fsdp", "FSDPModule", "fully_shard"),
        {"runtime/parameters.py": "says whether a module is sharded, without importing FSDP2"},
    ),
    "only training and fsdp know GradScaler": (
        BELOW_TRAINING,
        ("torch.amp", "GradScaler"),
        {"runtime/gradient_runner.py": "takes it from attach, and reads its scale for error feedback"},
    ),
    # An algorithm's interface names the optimizers that it is attached with, and QAdam is an optimizer.
    "below algorithms only the runner knows optimizers": (
        BELOW_TRAINING[1:],
        ("torch.optim", "Optimizer"),
        {
            "runtime/runner.py": "is notified of their steps, and an impl returns what is called at their end",
            "runtime/optimizer_steps.py": "notifies the runner",
        },
    ),
}


@cache
def names_in(name: str) -> set[str]:
    """Return every dotted name that a file imports or uses, with aliases such as `dist` written out."""
    aliases: dict[str, str] = {}
    found: set[str] = set()
    for node in nodes_of(name):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
            aliases.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
            aliases.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    for node in nodes_of(name):
        if isinstance(node, ast.Name):
            found.add(aliases.get(node.id, node.id))
        elif isinstance(node, ast.Attribute):
            found.add(dotted(node, aliases))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            found.add(node.value)  # an annotation in quotes, or a key of sys.modules
    return found


def dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, aliases)}.{node.attr}"
    return aliases.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def uses(name: str, forbidden: tuple[str, ...]) -> Iterator[str]:
    """Yield the names in a file that are forbidden, or below a forbidden name."""
    return (used for used in sorted(names_in(name)) if any(f".{known}." in f".{used}." for known in forbidden))


@pytest.mark.parametrize("contract", CONTRACTS)
def test_contract(contract: str) -> None:
    packages, forbidden, exceptions = CONTRACTS[contract]
    within = [name for name in SOURCES if name.split("/")[0] in packages]
    found = {name: used for name in within if (used := list(uses(name, forbidden)))}
    assert {name: used for name, used in found.items() if name not in exceptions} == {}
    assert exceptions.keys() <= found.keys(), "an exception that is no longer needed"


def test_above_transport_no_backend_is_named() -> None:
    """Not even in a comment: these packages depend on a transport's abilities."""

    def named(name: str) -> Iterator[str]:
        for number, line in enumerate(SOURCES[name].read_text(encoding="utf-8").splitlines(), 1):
            if re.search("gloo|nccl", line, re.IGNORECASE):
                yield f"line {number}: {line.strip()}"

    above = ("collectives", "runtime", "algorithms", "training", "fsdp")
    others = [name for name in SOURCES if name.split("/")[0] not in above]
    assert breaches(named, *others) == []


# The compatibility layers use only the public API, as user code does.

PUBLIC = ["torchbagua"]
PUBLIC += [f"torchbagua.{name}" for name in ("algorithms", "codecs", "collectives", "extend", "fsdp", "observe")]
OF_COMPAT = [name for name in SOURCES if name.startswith("compat/")]


@cache
def names_of_package(module: str) -> set[str]:
    """Return what may be imported from a public package: `__all__`, `X as X`, and its public subpackages."""
    package = importlib.import_module(module)
    return {
        *package.__all__,
        *re_exports(package),
        *(name.rpartition(".")[2] for name in PUBLIC if name.rpartition(".")[0] == module),
    }


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@cache
def own_private_names() -> set[str]:
    """Return the private names that compat defines: functions, classes, and assigned names."""
    found = set()
    for node in (node for name in OF_COMPAT for node in nodes_of(name)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return set(filter(is_private, found))


def private_uses(name: str) -> Iterator[str]:
    """Yield the names that a source of compat uses, and user code must not use."""
    for used in sorted(names_in(name)):
        if used.startswith("torchbagua.") and not used.startswith("torchbagua.compat"):
            package = max((public for public in PUBLIC if f"{used}.".startswith(f"{public}.")), key=len)
            first, *rest = used.removeprefix(package).strip(".").split(".")
            if (first and first not in names_of_package(package)) or any(map(is_private, rest)):
                yield used
    own, of_torch = own_private_names(), name.endswith("/_torch.py")
    for node in nodes_of(name):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield f"line {node.lineno}: a relative import"
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and not (of_torch or node.attr in own):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_compat_uses_only_public_names_and_nothing_imports_it() -> None:
    assert breaches(private_uses, *(name for name in SOURCES if name not in OF_COMPAT)) == []
    assert list(private_uses("training/attach.py")), "it finds those of other packages"
    assert breaches(lambda name: uses(name, ("torchbagua.compat",)), "compat/") == []


def test_no_module_is_shadowed_by_a_name_of_its_package() -> None:
    """`import torchbagua.x.y as m` binds `m` to whatever the package calls `y`."""

    def shadowed(name: str) -> Iterator[str]:
        if not name.endswith("__init__.py"):
            return
        folder = SOURCES[name].parent
        modules = {path.stem for path in folder.glob("*.py")} | {path.name for path in folder.iterdir()}
        for node in nodes_of(name)[0].body:  # type: ignore[attr-defined]
            own = ".".join(["torchbagua", *folder.relative_to(PACKAGE).parts])
            if isinstance(node, ast.ImportFrom) and node.module != own:
                yield from {alias.asname or alias.name for alias in node.names} & modules

    assert breaches(shadowed) == []


def test_a_source_mentions_files_that_exist() -> None:
    """Paths are relative to the source's folder, the package or the repository."""

    def absent(name: str) -> Iterator[str]:
        mentioned = re.findall(
            r"(?<![\w/.])(?:[\w-]+/)*\w+\.(?:py|md|cuh)\b", SOURCES[name].read_text(encoding="utf-8")
        )
        folders = (SOURCES[name].parent, PACKAGE, REPOSITORY, REPOSITORY / "csrc_cuda")
        return (each for each in sorted(set(mentioned)) if not any((folder / each).exists() for folder in folders))

    assert breaches(absent) == []
