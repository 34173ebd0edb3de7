"""The CUDA kernels without a GPU: nvcc takes them and needs no register more than there are."""

import re
import shutil
from pathlib import Path

import pytest

import programs
from host_kernels import CSRC, KERNEL_FILES


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc, of the CUDA toolkit, is not on PATH")
@pytest.mark.parametrize("file", KERNEL_FILES)
@pytest.mark.parametrize(
    "architecture",
    [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90", pytest.param("sm_100", marks=pytest.mark.slow)],
)
def test_nvcc_compiles_the_kernels_without_spills(file: str, architecture: str, tmp_path: Path) -> None:
    (tmp_path / "main.cu").write_text(f'#include "kernels/{file}"\n')
    command = ["nvcc", "-cubin", f"-arch={architecture}", "-std=c++17", "--fmad=false", "-Xptxas", "-v", f"-I{CSRC}"]
    command += ["-Werror", "all-warnings", "-Wno-deprecated-gpu-targets", "main.cu", "-o", "main.cubin"]
    compiled = programs.run(command, cwd=tmp_path, timeout_s=200)
    report = compiled.stdout + compiled.stderr
    kernels = re.findall(r"Compiling entry function '(\w+)'", report)
    assert kernels
    assert not [name for name in kernels if name.startswith("_Z")], "found by its plain name: it must be extern C"
    # Also those of functions that were not inlined.
    properties = dict(re.findall(r"Function properties for (\w+)\n\s*(.*)", report))
    assert set(kernels) <= properties.keys(), report
    assert set(properties.values()) == {"0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"}, report
