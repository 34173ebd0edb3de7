"""Tests use public names of the package's objects, so that its internals may change; the exceptions are listed here."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import torchbagua as tb
from test_sources import is_self

TESTS = Path(__file__).parent

# The private names that each file still uses. Add none: use what the package's other modules use.
ALLOWED: dict[str, set[str]] = {
    "integrations/test_lightning.py": {"_arguments"},
    "test_connections.py": {"_transports"},
    "test_cuda_launcher.py": {"_registered"},
    "test_forks.py": {"_close_at_exit"},
    "test_gpu_lanes.py": {"_exchange_capture_mode"},
    "test_torch_private.py": {"_Failure"},
    "test_user_warning.py": {"_warn_of_reference"},
}
# Patches the package's internals to bring faults back.
EXEMPT = "past_bugs.py"
# Names of other libraries' objects, which the package has too; what Bagua's own algorithms, copied here, assign to
# buckets and parameters; and a method of a benchmark.
OF_OTHERS = {"_step_supports_amp_scaling", "_bagua_backend"}
OWN = {"test_torch_api_own.py": {"_momentum", "_op", "_peer_weight", "_replicas"}}


def definitions(tree: ast.AST) -> set[str]:
    """Return the private functions and classes, attributes of `self`, and variables of modules and classes.

    Constants, which tests tune, do not count.
    """
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            found.add(node.attr)
        for statement in node.body if isinstance(node, ast.Module | ast.ClassDef) else ():
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in found if re.fullmatch(r"_[a-zA-Z]\w*", name) and not name.isupper()}


def used_names(source: str, names: set[str]) -> Iterator[str]:
    """Yield those of these names that a file uses and does not define: as an attribute, an import, or in a string."""
    if names.isdisjoint(re.findall(r"\w+", source)):  # parsing takes longer
        return
    tree = ast.parse(source)
    names = names - definitions(tree)
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Attribute) and not is_self(node.value):
            found = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call):  # setattr(instance, "_name", value) or patch("torchbagua.module._name")
            strings = [each.value for each in node.args if isinstance(each, ast.Constant)]
            found = [re.sub(r"^torchbagua\..*\.", "", string) for string in strings if isinstance(string, str)]
        yield from names.intersection(found)


def test_tests_use_public_names_but_for_a_list_that_shrinks() -> None:
    package = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(tb.__file__).parent.rglob("*.py")]
    names = set().union(*map(definitions, package)) - OF_OTHERS
    used = {}
    for path in sorted(TESTS.rglob("*.py")):
        own_names = OWN.get(path.name, set())
        if found := set(used_names(path.read_text(encoding="utf-8"), names - own_names)):
            used[path.relative_to(TESTS).as_posix()] = found
    assert used.pop(EXEMPT)
    assert used == ALLOWED, "test public behaviour instead; remove from ALLOWED what is not used any more"
