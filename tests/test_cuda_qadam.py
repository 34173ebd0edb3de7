"""The CUDA kernels of QAdam's update, on the host: the bits of the reference."""

import ctypes

import pytest
import torch
from torch import Tensor

from host_kernels import HostKernels
from test_native_qadam import LENGTHS, NUMBERS, arguments, same
from torchbagua.native import reference

KERNELS = {
    torch.float32: "torchbagua_qadam_update_float32",
    torch.bfloat16: "torchbagua_qadam_update_bfloat16",
    torch.float16: "torchbagua_qadam_update_float16",
}
NUM_BLOCKS, BLOCK_THREADS = 3, 64  # fewer than the chunks and vectors: a block takes several, a thread too
GUARD = 16  # elements before and after every tensor that no kernel may touch


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


def run(host_kernels: HostKernels, dtype: torch.dtype, work: QAdamLaunch, blocks: range, num_blocks: int) -> None:
    kernel = KERNELS[dtype]
    assert (
        host_kernels.run(kernel, work, STEP, blocks=blocks, num_blocks=num_blocks, num_threads=BLOCK_THREADS) == "done"
    )


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
    host_kernels: HostKernels, dtype: torch.dtype, is_hostile: bool, shifts: tuple[int, ...], chunk_elements: int
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

    run(host_kernels, dtype, work, range(NUM_BLOCKS), NUM_BLOCKS)

    reference.qadam_update(*of_reference, **NUMBERS)
    for own, others in zip(mine, theirs, strict=True):
        assert all(map(same, own, others))
    if not is_hostile:
        assert not torch.equal(tensors[0][-2], originals[0][-1])


def test_nothing_to_do(host_kernels: HostKernels) -> None:
    run(host_kernels, torch.float32, QAdamLaunch(None, 0, 0, 1024), range(2), 2)


@pytest.mark.parametrize("dtype", KERNELS)
def test_elements_beyond_32_bits(host_kernels: HostKernels, dtype: torch.dtype) -> None:
    """The last chunk of a tensor of 2^33 + 1000 elements, of which only that chunk is in memory."""
    before, chunk_elements = 2**33, 1024
    tensors = [[own[LENGTHS.index(1000)]] for own in arguments(dtype)]
    theirs = [[tensor.clone() for tensor in own] for own in tensors]
    addresses = [tensor.data_ptr() - before * dtype.itemsize for (tensor,) in tensors]
    table = torch.tensor([*addresses, before + 1000, 0], dtype=torch.int64)
    last = before // chunk_elements
    work = QAdamLaunch(table.data_ptr(), last + 1, 1, chunk_elements)

    run(host_kernels, dtype, work, range(last, last + 1), last + 1)

    reference.qadam_update(*theirs, **NUMBERS)
    for own, others in zip(tensors, theirs, strict=True):
        assert all(map(same, own, others))
