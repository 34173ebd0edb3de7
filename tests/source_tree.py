"""Copies of the sources to install from or to break, and separate processes that use them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import programs
import warm_python
from torchbagua.native import recipe

REPOSITORY = Path(__file__).resolve().parents[1]
COMPILER = os.environ.get("CXX", "c++").split()


def copy_sources(to: Path) -> Path:
    """Copies the files that an installation needs, without built libraries, into the new folder `to`; returns `to`."""
    for name in ("torchbagua", "csrc_cuda"):
        shutil.copytree(REPOSITORY / name, to / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, to)
    return to


def replace_cpu_sources(csrc: Path, source: str = "// no kernels\n") -> None:
    """Replaces the sources of the CPU library by one, which compiles quickly; `csrc` need not have any yet."""
    for file in csrc.glob(recipe.CPU.sources):
        file.unlink()
    only = csrc / recipe.CPU.sources.replace("*", "only")
    only.parent.mkdir(parents=True, exist_ok=True)
    only.write_text(source)


def build_empty_library(checkout: Path) -> None:
    """Builds an empty CPU library ahead of time, which `checkout` loads; otherwise, it would have to compile.

    Call it when no source of `checkout` will change any more.
    """
    library = checkout / "torchbagua" / "native" / f"{recipe.stem(recipe.CPU, checkout / 'csrc_cuda')}.abi3.so"
    programs.run([*COMPILER, "-shared", "-fPIC", "-x", "c++", os.devnull, "-o", library])


def compiler_that(script: Path, does: str) -> Path:
    """Writes the compiler `script`: c++, which first runs the shell line `does` if it is given a file to compile."""
    script.write_text(f"""#!/bin/sh
case " $* " in *" -c "*) {does};; esac
exec c++ "$@"
""")
    script.chmod(0o755)
    return script


def python_started(code: str, folder: Path, **variables: str) -> AbstractContextManager["subprocess.Popen[str]"]:
    """Starts `code` in a Python that imports torchbagua from `folder`; `variables` are added to the environment."""
    pipe, environment = subprocess.PIPE, _environment(folder, variables)
    return programs.started([sys.executable, "-c", code], cwd=folder, env=environment, stdout=pipe, stderr=pipe)


def _environment(folder: Path, variables: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("CXX", "TORCHBAGUA_NATIVE")}
    return {**kept, "PYTHONPATH": str(folder), **variables}


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Waits for `process`, at most three minutes; returns its exit status and its output on stdout and stderr."""
    out, err = process.communicate(timeout=180)
    return process.returncode, out, err


def run_python(code: str, folder: Path, **variables: str) -> tuple[int, str, str]:
    """Runs `code` as `python_started` starts it; returns its exit status and its output on stdout and stderr."""
    with python_started(code, folder, **variables) as process:
        return finish(process)


def fork_python(code: str, folder: Path, **variables: str) -> tuple[int, str, str]:
    """Runs `code` as `run_python` does, in a fork of a Python that has imported torch, see warm_python.py."""
    done = warm_python.run(["-c", code], cwd=folder, env=_environment(folder, variables), timeout_s=180, check=False)
    return done.returncode, done.stdout, done.stderr


def fork_started(code: str, folder: Path, out: Path, **variables: str) -> AbstractContextManager[warm_python.Fork]:
    """Starts `code` as `python_started` does, in such a fork; all its output is in the new file `out`."""
    return warm_python.started(["-c", code], out=out, cwd=folder, env=_environment(folder, variables))
