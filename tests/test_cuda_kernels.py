"""The CUDA kernels without a GPU: nvcc takes them, and compiled for the host they give the bits of the reference."""

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from source_tree import REPOSITORY
from test_native_qadam import LENGTHS, NUMBERS, arguments, same
from torchbagua.native import reference

CSRC = REPOSITORY / "csrc_cuda"
KERNEL_FILES = sorted(path.name for path in (CSRC / "kernels").glob("*.cuh") if "__global__" in path.read_text())
COMPILER = os.environ.get("CXX", "c++").split()
HAS_COMPILER = shutil.which(COMPILER[0]) is not None
KERNELS = {
    torch.float32: "torchbagua_qadam_update_float32",
    torch.bfloat16: "torchbagua_qadam_update_bfloat16",
    torch.float16: "torchbagua_qadam_update_float16",
}
NUM_BLOCKS, BLOCK_THREADS = 3, 64  # fewer than the chunks and vectors: a block takes several, a thread too
GUARD = 16  # elements before and after every tensor that no kernel may touch


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc, of the CUDA toolkit, is not on PATH")
@pytest.mark.parametrize("file", KERNEL_FILES)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_nvcc_compiles_the_kernels_without_spills(file: str, architecture: str, tmp_path: Path) -> None:
    (tmp_path / "main.cu").write_text(f'#include "kernels/{file}"\n')
    command = ["nvcc", "-cubin", f"-arch={architecture}", "-std=c++17", "--fmad=false", "-Xptxas", "-v", f"-I{CSRC}"]
    command += ["-Werror", "all-warnings", "-Wno-deprecated-gpu-targets", "main.cu", "-o", "main.cubin"]
    compiled = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200)
    report = compiled.stdout + compiled.stderr
    assert compiled.returncode == 0, report
    kernels = re.findall(r"Compiling entry function '(\w+)'", report)
    assert kernels
    assert not [name for name in kernels if name.startswith("_Z")], "found by its plain name: it must be extern C"
    # Also those of functions that were not inlined.
    properties = dict(re.findall(r"Function properties for (\w+)\n\s*(.*)", report))
    assert set(kernels) <= properties.keys(), report
    assert set(properties.values()) == {"0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"}, report


def test_sources_of_kernels_include_no_standard_header() -> None:
    """NVRTC has none."""
    assert KERNEL_FILES
    for path in [*CSRC.glob("kernels/*"), *CSRC.glob("element/*")]:
        assert not re.findall(r"#\s*include\s*<.*", path.read_text()), path


class Dim3(ctypes.Structure):
    """As in cuda_on_host.h."""

    _fields_ = [(name, ctypes.c_uint) for name in "xyz"]


class QAdamLaunch(ctypes.Structure):
    """As in qadam.cuh."""

    _fields_ = [
        ("tensors", ctypes.c_void_p),
        ("num_chunks", ctypes.c_longlong),
        ("num_tensors", ctypes.c_int),
        ("chunk_elements", ctypes.c_int),
    ]


class QAdamStep(ctypes.Structure):
    """As in element/qadam.h."""

    _fields_ = [
        (name, ctypes.c_float)
        for name in (
            "gradient_sign",
            "weight_decay",
            "shrink",
            "beta1",
            "one_minus_beta1",
            "root_correction2",
            "eps",
            "largest_ratio",
            "step_size",
        )
    ]


STEP = QAdamStep(one_minus_beta1=1.0 - NUMBERS["beta1"], **NUMBERS)


@pytest.fixture(scope="module")
def host_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels as functions of the host."""
    if not HAS_COMPILER:
        pytest.skip(f"there is no C++ compiler ({COMPILER[0]} is not on PATH)")
    folder = tmp_path_factory.mktemp("cuda_on_host")
    includes = [f'#include "{Path(__file__).with_name("cuda_on_host.h")}"']
    includes += [f'#include "kernels/{file}"' for file in KERNEL_FILES]
    (folder / "main.cpp").write_text("\n".join(includes) + "\n")
    command = [*COMPILER, "-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC"]
    command += [f"-I{CSRC}", "main.cpp", "-o", "kernels.so"]
    subprocess.run(command, cwd=folder, check=True, timeout=200)
    return ctypes.CDLL(str(folder / "kernels.so"))


def launch(library: ctypes.CDLL, kernel: str, *arguments: ctypes.Structure, blocks: range, grid: int) -> None:
    """Runs `blocks` of a grid, thread after thread, from the last to the first: no thread may wait for another."""
    block, thread = Dim3.in_dll(library, "blockIdx"), Dim3.in_dll(library, "threadIdx")
    Dim3.in_dll(library, "gridDim").x = grid
    Dim3.in_dll(library, "blockDim").x = BLOCK_THREADS
    run_thread = getattr(library, kernel)
    run_thread.restype = None
    for block_index in reversed(blocks):
        for thread_index in reversed(range(BLOCK_THREADS)):
            block.x, thread.x = block_index, thread_index
            run_thread(*arguments)


def launch_table(tensors: list[list[Tensor]], chunk_elements: int) -> tuple[Tensor, int]:
    """The table of a launch over `tensors`, four lists, and its number of chunks."""
    rows, num_chunks = [], 0
    for four in zip(*tensors, strict=True):
        length = four[0].numel()
        rows.append([*(tensor.data_ptr() for tensor in four), length, num_chunks])
        num_chunks += -(-length // chunk_elements)
    return torch.tensor(rows, dtype=torch.int64), num_chunks


def guarded(tensor: Tensor, shift: int) -> Tensor:
    """A buffer with a copy between guards, `shift` elements beyond an address that vectors fit: see `inside`."""
    buffer = torch.full((tensor.numel() + 2 * GUARD + shift,), 7.0, dtype=tensor.dtype)
    assert buffer.data_ptr() % 16 == 0
    inside(buffer, shift).copy_(tensor)
    return buffer


def inside(buffer: Tensor, shift: int) -> Tensor:
    """The copy that `guarded` made."""
    return buffer[GUARD + shift : -GUARD]


@pytest.mark.parametrize("dtype", KERNELS)
@pytest.mark.parametrize("is_hostile", [False, True])
@pytest.mark.parametrize(
    ("shifts", "chunk_elements"),
    [
        ((0, 0, 0, 0), 1024),
        ((0, 0, 0, 0), 1001),  # later chunks of an aligned tensor are not aligned
        ((0, 0, 0, 0), 2**20),
        ((1, 1, 1, 1), 1024),
        ((1, 0, 0, 0), 1024),
        ((0, 1, 0, 0), 1024),
        ((0, 0, 1, 0), 1024),
        ((0, 0, 0, 1), 1024),
    ],
)
def test_kernels_give_the_bits_of_the_reference(
    host_library: ctypes.CDLL, dtype: torch.dtype, is_hostile: bool, shifts: tuple[int, ...], chunk_elements: int
) -> None:
    originals = arguments(dtype, is_hostile=is_hostile)
    # Tensors that are empty (LENGTHS[0]) come first, last and several in a row.
    order = [0, 1, 0, 0, *range(1, len(LENGTHS)), 0]

    def buffers() -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        whole = [[guarded(own[i], shift) for i in order] for own, shift in zip(originals, shifts, strict=True)]
        return whole, [[inside(buffer, shift) for buffer in own] for own, shift in zip(whole, shifts, strict=True)]

    mine, tensors = buffers()
    theirs, of_reference = buffers()
    table, num_chunks = launch_table(tensors, chunk_elements)
    work = QAdamLaunch(table.data_ptr(), num_chunks, len(order), chunk_elements)

    launch(host_library, KERNELS[dtype], work, STEP, blocks=range(NUM_BLOCKS), grid=NUM_BLOCKS)

    reference.qadam_update(*of_reference, **NUMBERS)
    for own, others in zip(mine, theirs, strict=True):
        assert all(map(same, own, others))
    if not is_hostile:
        assert not torch.equal(tensors[0][-2], originals[0][-1])


def test_nothing_to_do(host_library: ctypes.CDLL) -> None:
    launch(host_library, KERNELS[torch.float32], QAdamLaunch(None, 0, 0, 1024), STEP, blocks=range(2), grid=2)


@pytest.mark.parametrize("dtype", KERNELS)
def test_elements_beyond_32_bits(host_library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """The last chunk of a tensor of 2^33 + 1000 elements, of which only that chunk is in memory."""
    before, chunk_elements = 2**33, 1024
    tensors = [[own[LENGTHS.index(1000)]] for own in arguments(dtype)]
    theirs = [[tensor.clone() for tensor in own] for own in tensors]
    addresses = [tensor.data_ptr() - before * dtype.itemsize for (tensor,) in tensors]
    table = torch.tensor([*addresses, before + 1000, 0], dtype=torch.int64)
    last = before // chunk_elements
    work = QAdamLaunch(table.data_ptr(), last + 1, 1, chunk_elements)

    launch(host_library, KERNELS[dtype], work, STEP, blocks=range(last, last + 1), grid=last + 1)

    reference.qadam_update(*theirs, **NUMBERS)
    for own, others in zip(tensors, theirs, strict=True):
        assert all(map(same, own, others))
