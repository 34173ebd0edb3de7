"""Names that a package must not use, in addition to the import layers in pyproject.toml; found in its sources."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchbagua as tb
from source_tree import REPOSITORY

PACKAGE = REPOSITORY / "torchbagua"
BELOW_TRAINING = ("algorithms", "runtime", "collectives", "transport", "codecs", "native", "observe")

# Per contract: packages, names that they must not use, and excepted files, each with its reason.
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


def names_in(source: str) -> set[str]:
    """Return every dotted name that a source imports or uses, with aliases such as `dist` written out."""
    tree = ast.parse(source)
    aliases: dict[str, str] = {}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
            aliases.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    for node in ast.walk(tree):
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


def breaches(source: str, forbidden: tuple[str, ...]) -> list[str]:
    """Return the names in a source that are forbidden, or below a forbidden name."""
    return sorted(name for name in names_in(source) if any(f".{known}." in f".{name}." for known in forbidden))


def sources(packages: tuple[str, ...]) -> Iterator[Path]:
    for package in packages:
        yield from sorted((PACKAGE / package).rglob("*.py"))


@pytest.mark.parametrize("contract", CONTRACTS)
def test_contract(contract: str) -> None:
    packages, forbidden, exceptions = CONTRACTS[contract]
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in sources(packages)
        if (names := breaches(path.read_text(), forbidden))
    }
    assert {path: names for path, names in found.items() if path not in exceptions} == {}
    assert exceptions.keys() <= found.keys(), "an exception that is no longer needed"


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ngroup = dist.group",
        "import torch\nx: torch.distributed.ProcessGroup",
        "from torch.distributed import ReduceOp",
        "import torch\nx: 'torch.distributed.ProcessGroup'",
    ],
)
def test_a_breach_is_found(source: str) -> None:
    assert breaches(source, ("torch.distributed",))


def test_above_transport_no_backend_is_named() -> None:
    """Not even in a comment: these packages depend on a transport's abilities."""
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sources(("collectives", "runtime", "algorithms", "training", "fsdp"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search("gloo|nccl", line, re.IGNORECASE)
    ]
    assert not found, "\n".join(found)


def test_nothing_imports_compat() -> None:
    inside = PACKAGE / "compat"
    importing = [
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        if not path.is_relative_to(inside) and breaches(path.read_text(), ("torchbagua.compat",))
    ]
    assert importing == []


def test_the_root_has_packages_and_few_small_modules() -> None:
    modules = {path.name: len(path.read_text().splitlines()) for path in PACKAGE.glob("*.py")}
    assert {name for name in modules if not name.startswith("_")} == {"extend.py", "version.py"}
    small = {name: length for name, length in modules.items() if name not in ("__init__.py", "_torch.py")}
    assert max(small.values()) <= 80, small


def test_the_root_has_few_names() -> None:
    named = {name: getattr(tb, name) for name in tb.__all__}
    algorithms = {
        name: each for name, each in named.items() if isinstance(each, type) and issubclass(each, tb.Algorithm)
    }
    others = named.keys() - algorithms.keys() - {"QAdamOptimizer", "__version__"} | {"Algorithm"}
    assert len(others) <= 14, others
    full_names = [name for name in algorithms if name.endswith("Algorithm") and name != "Algorithm"]
    assert [name for name in full_names if algorithms[name.removesuffix("Algorithm")] is not algorithms[name]] == []


def test_no_module_is_shadowed_by_a_name_of_its_package() -> None:
    """`import torchbagua.x.y as m` binds `m` to whatever the package calls `y`."""
    for init in PACKAGE.rglob("__init__.py"):
        modules = {path.stem for path in init.parent.glob("*.py")} | {path.name for path in init.parent.iterdir()}
        imported = {
            alias.asname or alias.name
            for node in ast.parse(init.read_text()).body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if node.module != ".".join(["torchbagua", *init.parent.relative_to(PACKAGE).parts])
        }
        assert imported & modules == set(), init
