"""An object's attributes are assigned in the module of its class only: whoever reads the class sees every change."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchbagua as tb

PACKAGE = Path(tb.__file__).parent

# Integrations assign the attributes of other people's interfaces, and _torch.py assigns torch's.
OTHERS = ("integrations", "testing", "_torch.py", "compat/bagua/_torch.py")

# The fields of structures that C reads.
OF_C = {"native/tensor_tables.py"}

# Attributes of torch's and Python's objects.
OF_TORCH_AND_PYTHON = {
    "atexit",
    "broadcast_buffers",
    "environ",
    "forward",
    "grad",
    "require_backward_grad_sync",
    "asyncOp",
    "training",
}


def modules() -> list[Path]:
    paths = {path: path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))}
    return [
        path for path, name in paths.items() if name.parts[0] not in OTHERS and name.as_posix() not in {*OTHERS, *OF_C}
    ]


def own_attributes(tree: ast.AST) -> set[str]:
    """Return the attributes that the classes of a module have: assigned to `self`, annotated, or in the class."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            for statement in node.body:
                targets = (
                    statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
                )
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def foreign_assignments(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    allowed = own_attributes(tree) | OF_TORCH_AND_PYTHON
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            target, attribute = node.value, node.attr
        elif is_setattr(node) and isinstance(node.args[1], ast.Constant):
            target, attribute = node.args[0], node.args[1].value
        else:
            continue
        if not is_self(target) and attribute not in allowed:
            yield f"line {node.lineno}: {ast.unparse(node)}"


def is_setattr(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr"


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_only_its_own_module_assigns_an_objects_attributes(path: Path) -> None:
    assert list(foreign_assignments(path.read_text(encoding="utf-8"))) == []


def test_a_foreign_assignment_is_found() -> None:
    source = (
        "class A:\n    def __init__(self):\n        self.x = 1\n\n\na.x = 2\nrunner.name = 'b'\nsetattr(a, 'y', 3)\n"
    )
    assert list(foreign_assignments(source)) == ["line 7: runner.name", "line 8: setattr(a, 'y', 3)"]
