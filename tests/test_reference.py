"""The documentation against the package: its lists, the page of all public names, and the paths that it mentions."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import torchbagua as tb
from documentation import PAGES, ROOT
from torchbagua.algorithms.base import get
from torchbagua.cli import __main__ as command_line
from torchbagua.codecs.base import REGISTRY

sys.path += [str(ROOT / "docs_build"), str(ROOT / "benchmarks")]
import errors
import figure_texts as texts
import figures
import markers
import tables
import words
from contestants import COMPUTE_ONLY, CONTESTANTS
from horizon_report import summarise_row

PACKAGE = ROOT / "torchbagua"
REFERENCE = ROOT / "docs" / "api" / "index.md"
PUBLIC_MODULES = (
    "",
    ".algorithms",
    ".codecs",
    ".collectives",
    ".compat.mlbench",
    ".elastic",
    ".extend",
    ".fsdp",
    ".observe",
    ".testing",
    ".testing.simulation",
    ".transport",
    ".testing.transports",
)


# Lists that are generated from the registries


def test_lists_match_the_registries_and_examples_of_errors_are_up_to_date() -> None:
    outdated = [name for name in tables.FILES if (ROOT / name).read_text(encoding="utf-8") != tables.updated(name)]
    assert outdated == [], "run `make tables`"
    assert (ROOT / errors.PAGE).read_text(encoding="utf-8") == errors.updated(), "run `make tables`"


def test_one_term_for_each_concept() -> None:
    assert [found[0] for _, text in words.prose_of_page("It travels.") for found in words.uses(text)] == ["travels"]
    assert not list(words.problems())


def test_each_list_is_in_one_file() -> None:
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in tables.FILES]
    found = [marked["name"] for text in texts for marked in markers.pattern(tables.PROGRAM).finditer(text)]
    assert sorted(found) == sorted(make.__name__ for make in tables.LISTS)


def test_tables_have_every_registered_algorithm_and_codec() -> None:
    algorithms = [name for name in tb.available_algorithms() if get(name).__module__.startswith("torchbagua.")]
    table = (ROOT / "docs" / "algorithms" / "index.md").read_text(encoding="utf-8")
    assert algorithms
    assert [name for name in algorithms if f'| `"{name}"` |' not in table] == []
    codecs = [name for name, make in REGISTRY.items() if make.__module__.startswith("torchbagua.")]
    page = (ROOT / "docs" / "wire-formats.md").read_text(encoding="utf-8")
    table = page.split("## The bytes of a chunk")[1].split("\n### ")[0]
    assert codecs
    assert [name for name in codecs if f'`"{name}"`' not in table] == []


# The page of all public names


def rows() -> list[tuple[str, list[str]]]:
    """Return the module and the names of each row of the table in docs/api/index.md."""
    cells = re.findall(r"^\| [^|]*\| `([\w.]+)` \| (.*) \|$", REFERENCE.read_text(encoding="utf-8"), re.MULTILINE)
    return [(module, re.findall(r"`([^`]+)`", names)) for module, names in cells]


def module_at(path: str) -> ModuleType:
    """Return the module that users reach as `path`: importable, or an attribute of its parent, as tb.topology is."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        parent, _, name = path.rpartition(".")
        module: ModuleType = getattr(importlib.import_module(parent), name)
        return module


def constant(path: Path, name: str) -> Any:
    """Return the literal that the module in a file assigns to a name. The module is not imported."""
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
            return ast.literal_eval(statement.value)
    raise AssertionError(f"{path} assigns nothing to {name}")


def adapters() -> dict[str, list[str]]:
    """Return the public names of each module that adapts a framework. These modules are not imported."""
    found = {}
    for path in sorted((PACKAGE / "integrations").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if re.search(r"^from torchbagua\.integrations\.common import .*\bframework\b", text, re.MULTILINE):
            definitions = [
                statement for statement in ast.parse(text).body if isinstance(statement, ast.FunctionDef | ast.ClassDef)
            ]
            found[f"torchbagua.integrations.{path.stem}"] = [
                definition.name for definition in definitions if not definition.name.startswith("_")
            ]
    return found


def re_exports(module: ModuleType) -> list[str]:
    """Return the names that a package imports as `from x import y as y`: public too, for APIs built on this package."""
    assert module.__file__ is not None
    statements = ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body
    aliases = [alias for node in statements if isinstance(node, ast.ImportFrom) for alias in node.names]
    return [alias.name for alias in aliases if alias.name == alias.asname]


def public_names() -> Iterator[tuple[str, str]]:
    """Yield every public name with its module. A name that several modules export is yielded for each of them."""
    for suffix in PUBLIC_MODULES:
        module = importlib.import_module(f"torchbagua{suffix}")
        for name in [*module.__all__, *re_exports(module)]:
            if not isinstance(getattr(module, name), ModuleType):
                yield module.__name__, name
    for path in constant(ROOT / "docs_build" / "check.py", "FURTHER"):
        module_path, _, name = path.rpartition(".")
        yield module_path, name
    for module_path, names in adapters().items():
        yield from ((module_path, name) for name in names)
    yield from (("torchbagua", command) for command in command_line._COMMANDS)


def identity(module: str, name: str) -> tuple[object, str]:
    """Return a key that is the same for every module that exports a name."""
    if module.startswith("torchbagua.integrations.") or name in command_line._COMMANDS:
        return module, name
    return id(getattr(module_at(module), name)), name


def test_the_reference_lists_every_public_name_and_nothing_else() -> None:
    table = rows()
    listed = [(module, name) for module, names in table for name in names]
    assert sorted(set(listed)) == sorted(listed)
    public = {identity(*name): ".".join(name) for name in public_names()}
    in_table = {identity(*name): ".".join(name) for name in listed}
    assert [name for key, name in public.items() if key not in in_table] == [], "missing"
    assert [name for key, name in in_table.items() if key not in public] == [], "surplus"
    exported = {getattr(tb, name).__name__ for name in tb.__all__ if isinstance(getattr(tb, name), ModuleType)}
    compat = {f"torchbagua.compat.{path.parent.name}" for path in (PACKAGE / "compat").glob("*/__init__.py")}
    assert (exported | compat | set(adapters())) - {module for module, _ in table} == set()


# Paths that pages and docstrings mention

FOLDERS = "torchbagua|csrc_cuda|tests|docs_build|benchmarks|tutorials"
FILE = re.compile(rf"(?<![\w/.-])(?:{FOLDERS})/(?:[\w-]+/)*(?:[\w-]+\.\w+)?(?![\w<*-])")
DOTTED = re.compile(r"(?<![\w./-])(?:torchbagua|tb)(?:\.[A-Za-z_]\w*)+(?![\w/-])")


@cache
def exists(dotted: str) -> bool:
    """Return whether a dotted name is a module, or a chain of attributes of a module."""
    parts = re.sub(r"^tb\b", "torchbagua", dotted).split(".")
    if parts[1] == "integrations":
        module = ".".join(parts[:3])
        return (
            len(parts) == 2 or parts[2:] == ["common"] or parts[3:] in [[], *([n] for n in adapters().get(module, []))]
        )
    value: Any = tb
    for index, part in enumerate(parts[1:], 2):
        if not hasattr(value, part):
            try:
                importlib.import_module(".".join(parts[:index]))
            except ImportError:
                return False
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


def test_paths_and_names_on_pages_exist() -> None:
    absent = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        paths = [
            path for path in FILE.findall(text) if not (ROOT / path).exists() and not (page.parent / path).exists()
        ]
        names = [name for name in DOTTED.findall(text) if not exists(name)]
        absent += [f"{page.relative_to(ROOT)}: {each}" for each in (*paths, *names)]
    assert absent == []


def test_the_files_in_tables_of_the_design_page_exist() -> None:
    """They are written without the package's name. Those that `make walk` writes are files that it has seen."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    page = re.sub(r"<!-- made by docs_build/walk.py.*?<!-- end -->", "", page, flags=re.DOTALL)
    names = [
        name for line in page.splitlines() if line.startswith("|") for name in re.findall(r"`([\w/]+(?:\.py|/))`", line)
    ]
    assert names
    assert [name for name in names if not (PACKAGE / name).exists()] == []


@pytest.mark.slow
def test_trainings_execute_no_more_files_and_lines_than_recorded() -> None:
    program = [sys.executable, ROOT / "docs_build" / "walk.py", "--check"]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


# The pages' figures equal those of the recorded runs, which a single rule chooses and merges

ADVICE = "run `make bench-docs ARGS=--write`"


@pytest.fixture(scope="module")
def shown() -> Any:
    return figures.load_shown()


@pytest.mark.parametrize("name", figures.PAGES)
def test_a_page_has_the_figures_of_its_records(name: str, shown: Any) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == figures.updated(name, shown), ADVICE


def test_charts_have_the_figures_of_their_records(shown: Any) -> None:
    assert [path.name for path, svg in figures.charts(shown) if path.read_bytes() != svg] == [], ADVICE


def test_readme_has_the_losses_of_diloco_with_muon() -> None:
    summary = summarise_row(figures.load_horizon(), "muon_diloco_30")
    assert summary is not None
    losses = (
        f"loss {summary.over_adamw:+.1f}\u00a0% compared with DDP and AdamW, "
        f"{summary.over_same:+.1f}\u00a0% compared with DDP and Muon"
    )
    assert losses in (ROOT / "README.md").read_text(encoding="utf-8")


def test_tables_have_every_contestant_of_a_run() -> None:
    tables = {*texts.GRADIENTS, *texts.MOMENTA, *texts.WEIGHTS, *texts.NODES}
    measured = {name for name, contestant in CONTESTANTS.items() if not contestant.must_be_named}
    assert tables == measured - {COMPUTE_ONLY}
