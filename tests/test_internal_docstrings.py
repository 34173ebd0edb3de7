"""`Args` and `Raises` stand on public names; what is internal has a line that says what it is for."""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import torchbagua as tb
from test_reference import command_line, module_at, public_names

PACKAGE = Path(tb.__file__).parent

# Facades document other people's interfaces.
FACADES = ("cli", "compat", "integrations")


@cache
def public_qualnames() -> set[tuple[str, str]]:
    """Return the modules and qualified names of all public functions and classes, and of the methods of the latter."""
    found = set()
    for module, name in public_names():
        if module.startswith("torchbagua.integrations.") or name in command_line._COMMANDS:
            continue
        thing = getattr(module_at(module), name)
        for cls in thing.__mro__ if inspect.isclass(thing) else ():
            found |= {(cls.__module__, cls.__qualname__)}
            found |= {(cls.__module__, f"{cls.__qualname__}.{method}") for method in vars(cls)}
        if inspect.isroutine(thing):
            found.add((thing.__module__, inspect.unwrap(thing).__qualname__))
    return found


def internal_sections(path: Path) -> Iterator[str]:
    module = ".".join(("torchbagua", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    to_visit: list[tuple[str, ast.AST]] = [("", ast.parse(path.read_text(encoding="utf-8")))]
    for prefix, parent in to_visit:
        for node in ast.iter_child_nodes(parent):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                to_visit.append((prefix, node))
                continue
            name = f"{prefix}{node.name}"
            to_visit.append((f"{name}.", node))
            has_sections = re.search(r"^\s*(Args|Raises):$", ast.get_docstring(node) or "", re.MULTILINE)
            if has_sections and (module, name) not in public_qualnames():
                yield f"line {node.lineno}: {name}"


SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] not in FACADES]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_sections_stand_on_public_names(path: Path) -> None:
    assert list(internal_sections(path)) == []
