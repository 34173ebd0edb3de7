"""The CUDA kernels without a GPU: nvcc spills no registers, and issues loads before the first use."""

import importlib.util
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import programs
from host_kernels import CSRC, KERNEL_FILES, find_kernels, source_of
from made_once import made_once
from torchbagua.native import recipe


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, str]]:
    """Return a function that compiles all kernels, once for all workers, to machine code and nvcc's report."""

    def compile_once(architecture: str) -> tuple[Path, str]:
        def compile_into(folder: Path) -> None:
            (folder / "main.cu").write_text('#include "kernels/all.cuh"\n')
            command = ["nvcc", "-cubin", f"-arch={architecture}", "-std=c++17", "--fmad=false", "-Xptxas", "-v"]
            command += ["-Werror", "all-warnings", "-Wno-deprecated-gpu-targets", f"-I{CSRC}"]
            command += ["main.cu", "-o", "main.cubin"]
            done = programs.run(command, cwd=folder, timeout_s=200)
            (folder / "report").write_text(done.stdout + done.stderr)

        folder = made_once(tmp_path_factory, f"cubin_{architecture}", compile_into)
        return folder / "main.cubin", (folder / "report").read_text()

    return compile_once


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc, of the CUDA toolkit, is not on PATH")
@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(f"sm_{architecture}", marks=pytest.mark.slow if architecture == 90 else pytest.mark.release)
        for architecture in recipe.ARCHITECTURES
    ],
)
def test_nvcc_compiles_the_kernels_without_spills(
    architecture: str, compiled: Callable[[str], tuple[Path, str]]
) -> None:
    _, report = compiled(architecture)
    kernels = re.findall(r"Compiling entry function '(\w+)'", report)
    assert set(kernels) >= {name for file in KERNEL_FILES for name in find_kernels(source_of(file))}
    assert not [name for name in kernels if name.startswith("_Z")], "found by its plain name: it must be extern C"
    # The properties also include functions that were not inlined.
    properties = dict(re.findall(r"Function properties for (\w+)\n\s*(.*)", report))
    assert set(kernels) <= properties.keys(), report
    assert set(properties.values()) == {"0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"}, report


def disassembler() -> str | None:
    """Return NVIDIA's nvdisasm from PATH, or from its package; None if there is neither."""
    found = importlib.util.find_spec("nvidia")
    folders = [f"{folder}/cu13/bin" for folder in found.submodule_search_locations or ()] if found else []
    return shutil.which("nvdisasm") or shutil.which("nvdisasm", path=os.pathsep.join(folders))


def instructions_of(assembly: str, kernel: str) -> list[str]:
    """Return the instructions of a kernel, as nvdisasm prints them."""
    (section,) = re.findall(rf"^\.text\.{kernel}:\n(.*?)^\s*\.section", assembly, re.DOTALL | re.MULTILINE)
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", section)


def registers_of(operand: str, num_bytes: int = 4) -> set[int]:
    """Return the registers of a value of `num_bytes`, from the first register in `operand` on."""
    (first, *_) = map(int, re.findall(r"\bR(\d+)\b", operand))
    return set(range(first, first + num_bytes // 4))


def most_loads_in_flight(instructions: list[str]) -> int:
    """Return the most memory loads that are issued before any of their registers is read or written."""
    most, pending, num_pending = 0, set[int](), 0
    for instruction in instructions:
        load = re.search(r"\bLDG\.E(\.64)? (R\d+), (.*)", instruction)
        touched = {int(number) for number in re.findall(r"\bR(\d+)\b", load[3] if load else instruction)}
        if touched & pending:
            pending, num_pending = set(), 0
        if load:
            pending |= registers_of(load[2], 8 if load[1] else 4)
            num_pending += 1
            most = max(most, num_pending)
    return most


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc, of the CUDA toolkit, is not on PATH")
@pytest.mark.skipif(disassembler() is None, reason="nvdisasm, of the extra dev, is not installed")
@pytest.mark.parametrize(
    "architecture", [pytest.param("sm_80", marks=pytest.mark.release), pytest.param("sm_90", marks=pytest.mark.slow)]
)
def test_a_mean_loads_four_rows_before_it_decodes_one(
    architecture: str, compiled: Callable[[str], tuple[Path, str]]
) -> None:
    """Otherwise, every row would wait for memory again."""
    code, _ = compiled(architecture)
    assembly = programs.run([str(disassembler()), "-c", str(code)]).stdout
    # A thread has 32 elements of a row, and loads 8 or 4 of them at a time.
    for kernel, num_loads in {"decode_mean_encode": 4 * 32 // 8, "decode_mean_float32": 4 * 32 // 4}.items():
        instructions = instructions_of(assembly, f"torchbagua_minmax_uint8_{kernel}")
        assert most_loads_in_flight(instructions) >= num_loads
