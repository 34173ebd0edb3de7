"""Applies every mutant of mutants.py to a copy of the repository, and prints which test finds it: `make mutants`.

It runs the tests of `make test` once as they are, and records which functions each file executes (executed.py). Of each
mutant, it runs until a test fails: first the files that execute the broken function, then all others, then 300 seeds of
the simulation. A hang counts as found.
"""

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
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


def run(folder: Path, longest_s: float, *arguments: str, **variables: str) -> Run:
    """Run Python in a copy of the repository; then end the processes that it has started and left."""
    paths = [folder, folder / "benchmarks", folder / "tests"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), **variables}
    options = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "cwd": folder, "env": environment}
    with tempfile.TemporaryFile("w+") as output:
        status = None
        command = [sys.executable, *arguments]
        with started(command, stdout=output, **options) as process, suppress(subprocess.TimeoutExpired):
            status = process.wait(longest_s)
        output.seek(0)
        return Run(status, output.read())


def run_tests(folder: Path, longest_s: float, tests: Sequence[str]) -> str | None:
    """Run tests until one fails. Return its id; None if none fails."""
    options = ["-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", "-n", "0"]
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


def record_executed(folder: Path, longest_s: float, num_processes: int) -> dict[str, set[str]]:
    """Run the tests of `make test`. Return the functions of the package that each file executes; see executed.py."""
    with tempfile.TemporaryDirectory() as records:
        options = ["-q", "-p", "executed", "-p", "no:cacheprovider", "-n", str(num_processes), "--dist", "worksteal"]
        status, output = run(folder, longest_s, "-m", "pytest", *options, EXECUTED=records)
        if status != 0:
            sys.exit(f"the tests fail without a mutant:\n{output}")
        executed: dict[str, set[str]] = {}
        for path in Path(records).iterdir():
            for file, places in json.loads(path.read_text()).items():
                executed.setdefault(file, set()).update(places)
        return executed


def broken_function(mutant: Mutant) -> str:
    """Return the file of a mutant, and the first line of the innermost function that it breaks, if there is one."""
    text = (ROOT / mutant.path).read_text(encoding="utf-8")
    if mutant.package == "native":  # its callers run the kernels
        return "torchbagua/native/"
    line = text[: text.index(mutant.old)].count("\n") + 1 + (len(mutant.old) - len(mutant.old.lstrip("\n")))
    functions = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    if not functions:
        return f"{mutant.path}:"
    innermost = max(functions, key=lambda node: node.lineno)
    return f"{mutant.path}:{min([innermost.lineno, *(each.lineno for each in innermost.decorator_list)])}"


def files_in_stages(mutant: Mutant, executed: dict[str, set[str]]) -> tuple[list[str], list[str]]:
    """Return the test files that execute the broken function, namesakes and special ones first, and all others."""
    function = broken_function(mutant)
    if not any(function in places for places in executed.values()):  # none in this process: take those of the module
        function = function.partition(":")[0]
    using = [
        file
        for file, places in executed.items()
        if function in places or (":" not in function and any(place.startswith(function) for place in places))
    ]
    stem = ("native" if mutant.package == "native" else mutant.path.stem).replace("_", "")
    using.sort(key=lambda file: (stem not in file.replace("_", ""), len(executed[file])))
    tests = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("test_*.py")}
    return using, sorted(tests - {*using, "tests/test_mutants.py"})  # a mutant does not apply twice


def find(
    mutant: Mutant, executed: dict[str, set[str]], longest_s: float, *, is_quick: bool
) -> tuple[str | None, float]:
    """Return what finds a mutant, or None if nothing does, and the seconds."""
    start_s = time.monotonic()
    using, others = files_in_stages(mutant, executed)
    with copy_of_repository(mutant) as folder:
        found = run_tests(folder, longest_s, using)
        if found is None and not is_quick:
            found = run_tests(folder, longest_s, others) or run_simulation(folder, longest_s)
    return found, time.monotonic() - start_s


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names, or beginnings of names or files")
    parser.add_argument("--list", action="store_true", help="list the mutants")
    parser.add_argument("--quick", action="store_true", help="run only the tests that execute the broken function")
    parser.add_argument("--processes", type=int, default=3, metavar="N", help="mutants at a time (default: 3)")
    parser.add_argument(
        "--executed", type=Path, metavar="FILE", help="write there what test files execute, or read it if it is there"
    )
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
    survivors, is_sound = [], cache(lambda test: run_tests(clean, options.longest, [test]) is None)
    with copy_of_repository() as clean, ThreadPoolExecutor(options.processes) as pool:
        if options.executed is not None and options.executed.exists():
            executed = {file: {*places} for file, places in json.loads(options.executed.read_text()).items()}
        else:
            executed = record_executed(clean, options.longest, options.processes)
        if options.executed is not None:
            options.executed.write_text(json.dumps({file: sorted(places) for file, places in executed.items()}))
        print(f"{'mutant':{width}}  {'file':{file_width}}  seconds  found by")
        results = pool.map(partial(find, executed=executed, longest_s=options.longest, is_quick=options.quick), mutants)
        for mutant, (found, seconds) in zip(mutants, tqdm(results, total=len(mutants), disable=None), strict=True):
            if found is None:
                survivors.append(mutant)
            tqdm.write(f"{mutant.name:{width}}  {mutant.path!s:{file_width}}  {seconds:7.0f}  {found or 'NOTHING'}")
            if found is not None and "::" in found and not is_sound(found):
                sys.exit(f"make mutants: {found} fails without a mutant too; mend that first")
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants found")
    for mutant in survivors:
        print(f"not found: {mutant.name} in {mutant.path}")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
