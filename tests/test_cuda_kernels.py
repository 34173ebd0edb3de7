"""The CUDA kernels without a GPU: nvcc spills no registers."""

import re
import shutil
from pathlib import Path

import pytest

import programs
from host_kernels import CSRC, KERNEL_FILES, find_kernels, source_of
from torchbagua.native import recipe


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc, of the CUDA toolkit, is not on PATH")
@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(architecture, marks=pytest.mark.slow if architecture == 90 else pytest.mark.release)
        for architecture in recipe.ARCHITECTURES
    ],
)
def test_nvcc_compiles_the_kernels_without_spills(architecture: int, tmp_path: Path) -> None:
    (tmp_path / "main.cu").write_text('#include "kernels/all.cuh"\n')
    command = ["nvcc", "-cubin", f"-arch=sm_{architecture}", "-std=c++17", "--fmad=false", "-Xptxas", "-v"]
    command += ["-Werror", "all-warnings", "-Wno-deprecated-gpu-targets", f"-I{CSRC}", "main.cu", "-o", "main.cubin"]
    done = programs.run(command, cwd=tmp_path, timeout_s=200)
    report = done.stdout + done.stderr
    kernels = re.findall(r"Compiling entry function '(\w+)'", report)
    assert set(kernels) >= {name for file in KERNEL_FILES for name in find_kernels(source_of(file))}
    assert not [name for name in kernels if name.startswith("_Z")], "found by its plain name: it must be extern C"
    # The properties also include functions that were not inlined.
    properties = dict(re.findall(r"Function properties for (\w+)\n\s*(.*)", report))
    assert set(kernels) <= properties.keys(), report
    assert set(properties.values()) == {"0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"}, report
