"""Applies every mutant of mutants.py to a copy of the repository, and prints which test finds it: `make mutants`.

It runs the tests of `make test` until one fails: first the files that import the broken module, or names defined in it,
directly or through a helper in tests/; then all other files; then 300 seeds of the simulation. A hang counts as found.
"""

import argparse
import ast
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from mutants import MUTANTS, ROOT, Mutant
from programs import started

NUM_SEEDS = 300
TIMEOUT = "timeout"


@contextmanager
def copy_of_repository(mutant: Mutant | None = None) -> Iterator[Path]:
    """Copy the files that git knows, or would know, and the built kernels, to a folder that ends with the block."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    built: list[Path] = []
    if mutant is None or mutant.path.suffix == ".py":  # other kernels are compiled at first use
        built = [path.relative_to(ROOT) for path in (ROOT / "torchbagua/native").glob("*.so")]
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        for path in {*built, *map(Path, listed.stdout.decode().rstrip("\0").split("\0"))}:
            if (ROOT / path).is_file():  # not deleted
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, folder / path)
        if mutant is not None:
            (folder / mutant.path).write_text(mutant.source(), encoding="utf-8")
        yield Path(folder)


class Run(NamedTuple):
    """The exit status of a program, None if it ran too long, and its output."""

    status: int | None
    output: str


def run(folder: Path, longest_s: float, *arguments: str) -> Run:
    """Run Python in a copy of the repository; then end the processes that it has started and left."""
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{folder / 'benchmarks'}"}
    options = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "cwd": folder, "env": environment}
    with tempfile.TemporaryFile("w+") as output:
        status = None
        command = [sys.executable, *arguments]
        with started(command, stdout=output, **options) as process, suppress(subprocess.TimeoutExpired):
            status = process.wait(longest_s)
        output.seek(0)
        return Run(status, output.read())


def run_tests(folder: Path, longest_s: float, tests: Sequence[str], num_processes: int) -> str | None:
    """Run tests until one fails. Return its id; None if none fails."""
    parallel = ["-n", str(num_processes), "--dist", "worksteal"] if num_processes > 1 else ["-n", "0"]
    options = ["-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *parallel]
    status, output = run(folder, longest_s, "-m", "pytest", *options, *tests)
    if status is None:
        return TIMEOUT
    if status in (0, 5):  # 5: all of these tests have a mark that `make test` excludes
        return None
    if found := re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE):
        return found[1]
    return TIMEOUT if "Timeout (" in output else f"pytest exits with {status}: {output.strip().splitlines()[-1]}"


def run_simulation(folder: Path, longest_s: float) -> str | None:
    """Run the simulation. Return the arguments that repeat the first violation; None if there is none."""
    status, output = run(folder, longest_s, "-W", "ignore", "tests/simulate.py", "--seeds", str(NUM_SEEDS))
    if status == 0:
        return None
    found = re.search(r"make simulate ARGS='(.+)'", output)
    return f"simulation {found[1] if found else TIMEOUT if status is None else status}"


class Imports(NamedTuple):
    """What a file of tests/ refers to: modules, names of the package, and other files of tests/."""

    modules: set[str]
    names: set[str]
    helpers: set[str]


@cache
def imports_of(path: Path) -> Imports:
    """Return the imports of a file, and the attributes that it reads of imported modules of the package."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules, names, aliases = set[str](), set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
            aliases |= {
                (alias.asname or alias.name).split(".")[0] for alias in node.names if "torchbagua" in alias.name
            }
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            if node.module.startswith("torchbagua"):
                names |= {alias.name for alias in node.names}
                aliases |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            names.add(node.attr)
    helpers = {module for module in modules if (ROOT / "tests" / f"{module}.py").is_file()}
    return Imports(modules, names, helpers)


def distance(path: Path, module: str, defined: set[str], above: frozenset[Path] = frozenset()) -> float:
    """Return how many helpers are between a file and a module of the package; infinity if it does not use it."""
    imports = imports_of(path)
    is_user = any(name == module or name.startswith(f"{module}.") for name in imports.modules)
    if is_user or imports.names & defined:
        return 0
    helpers = [ROOT / "tests" / f"{helper}.py" for helper in imports.helpers]
    return 1 + min(
        (distance(helper, module, defined, above | {path}) for helper in helpers if helper not in above),
        default=math.inf,
    )


def files_in_stages(mutant: Mutant) -> tuple[list[str], list[str]]:
    """Return the test files that use the broken module, those named after it and the nearest first, and all others."""
    module, defined = "torchbagua.native", set[str]()  # tests call native operations by torch.ops
    if mutant.package != "native":
        module = ".".join(mutant.path.with_suffix("").parts)
        tree = ast.parse((ROOT / mutant.path).read_text(encoding="utf-8"))
        defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    paths = set((ROOT / "tests").glob("test_*.py")) - {ROOT / "tests/test_mutants.py"}  # a mutant does not apply twice
    namesakes = {path for path in paths if mutant.path.stem.replace("_", "") in path.stem.replace("_", "")}
    using: list[Path] = []
    while not using:  # no test imports some modules, so that those of their package come first
        distances = {path: distance(path, module, defined) for path in sorted(paths)}
        using = [path for path in distances if distances[path] < math.inf or path in namesakes]
        module = module.rpartition(".")[0]
    using.sort(key=lambda path: (path not in namesakes, distances[path]))
    others = [path for path in distances if path not in using]
    return [str(path.relative_to(ROOT)) for path in using], [str(path.relative_to(ROOT)) for path in others]


def find(mutant: Mutant, longest_s: float, num_processes: int, *, is_quick: bool) -> str | None:
    """Return what finds a mutant; None if nothing does."""
    using, others = files_in_stages(mutant)
    with copy_of_repository(mutant) as folder:
        found = run_tests(folder, longest_s, using, num_processes)
        if found is None and not is_quick:
            found = run_tests(folder, longest_s, others, num_processes) or run_simulation(folder, longest_s)
        return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names, or beginnings of names or files")
    parser.add_argument("--list", action="store_true", help="list the mutants")
    parser.add_argument("--quick", action="store_true", help="run only the tests that use the broken module")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="tests at a time (default: 2)")
    # A test that hangs ends its process after four minutes, see faulthandler_timeout. This ends what is left.
    parser.add_argument(
        "--longest", type=float, default=2400, metavar="S", help="a longer run of tests counts as a hang"
    )
    options = parser.parse_args()
    wanted = tuple(options.only or [""])
    mutants = [mutant for mutant in MUTANTS if mutant.name.startswith(wanted) or mutant.file.startswith(wanted)]
    if not mutants:
        parser.error(f"--only: no mutant or file begins with {' or '.join(wanted)}; see --list")
    width = max(len(mutant.name) for mutant in mutants)
    file_width = max(len(str(mutant.path)) for mutant in mutants)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name:{width}}  {mutant.path}")
        return 0
    survivors, is_sound = [], cache(lambda test: run_tests(clean, options.longest, [test], 1) is None)
    print(f"{'mutant':{width}}  {'file':{file_width}}  seconds  found by")
    with copy_of_repository() as clean:
        for mutant in tqdm(mutants, disable=None):
            start_s = time.monotonic()
            found = find(mutant, options.longest, options.processes, is_quick=options.quick)
            if found is None:
                survivors.append(mutant)
            seconds = time.monotonic() - start_s
            tqdm.write(f"{mutant.name:{width}}  {mutant.path!s:{file_width}}  {seconds:7.0f}  {found or 'NOTHING'}")
            if found is not None and "::" in found and not is_sound(found):
                sys.exit(f"make mutants: {found} fails without a mutant too; mend that first")
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants found")
    for mutant in survivors:
        print(f"not found: {mutant.name} in {mutant.path}")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
