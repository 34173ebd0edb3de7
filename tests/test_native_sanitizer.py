"""No input makes the native kernels access memory outside their tensors: a fuzzer with AddressSanitizer.

python tests/test_native_sanitizer.py --seconds 600 --seed 1     searches longer
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths, library_paths

import programs
from source_tree import COMPILER
from torchbagua.native import loader, recipe

FUZZER = Path(__file__).with_name("fuzz_native.py")


def runtime_library(name: str) -> Path | None:
    """Return a runtime library of the compiler, None if it has none of that name."""
    if shutil.which(COMPILER[0]) is None:
        return None
    found = programs.run([*COMPILER, f"-print-file-name={name}"])
    path = Path(found.stdout.strip())
    return path if path.is_absolute() else None


def compile_library(library: Path, *flags: str) -> None:
    csrc = loader.sources()
    includes = [f"-I{path}" for path in (csrc, *include_paths())]
    links = [f"-L{path}" for path in library_paths()] + ["-ltorch_cpu"]
    command = [
        *COMPILER,
        *recipe.CPU.cxx_flags,
        "-O1",
        "-g1",
        "-fsanitize=address",
        "-fPIC",
        "-shared",
        *flags,
        *includes,
    ]
    command += [*map(str, recipe.source_files(recipe.CPU, csrc)), "-o", str(library), *links]
    programs.run(command, timeout_s=240)


def fuzz(library: Path, seconds: float, seed: int) -> "subprocess.CompletedProcess[str]":
    # Python itself is C: the sanitizer finds __cxa_throw to wrap only if the C++ library is preloaded with it.
    preloaded = [str(runtime_library(name)) for name in ("libasan.so", "libstdc++.so")]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(preloaded),
        # Python does not free all its memory. A huge allocation must fail without ending the process.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
    }
    command = [sys.executable, str(FUZZER), "--library", str(library), "--seconds", str(seconds), "--seed", str(seed)]
    return programs.run(command, env=environment, check=False, timeout_s=seconds + 120)


@pytest.mark.release
def test_fuzzer_finds_no_overrun_and_detects_a_planted_one(tmp_path: Path) -> None:
    if runtime_library("libasan.so") is None:
        pytest.skip("the C++ compiler has no libasan.so")
    checked, unchecked = tmp_path / "checked.so", tmp_path / "unchecked.so"
    compile_library(checked)
    compile_library(unchecked, "-DTORCHBAGUA_UNCHECKED_TABLES")

    finished = fuzz(checked, seconds=2, seed=0)
    overrun = fuzz(unchecked, seconds=2, seed=0)

    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "AddressSanitizer" not in finished.stderr
    accepted, refused = (int(word) for word in finished.stdout.split() if word.isdigit())
    assert accepted > 50
    assert refused > 50
    assert overrun.returncode != 0
    assert "ERROR: AddressSanitizer" in overrun.stderr


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "checked.so"
        compile_library(library)
        result = fuzz(library, arguments.seconds, arguments.seed)
    print(result.stdout, end="")
    sys.exit(result.stderr if result.returncode != 0 else 0)
