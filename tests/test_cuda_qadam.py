"""QAdam's CUDA kernels on the host are bitwise equal to the reference."""

import pytest
import torch
from torch import Tensor

from host_kernels import HostKernels, QAdamForm, QAdamStep
from test_native_qadam import FORMS, LENGTHS, NUMBERS, arguments, same
from torchbagua.native.ops import NATIVE_OPS
from torchbagua.native.tensor_tables import TensorTable, table_type

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUM_BLOCKS, BLOCK_THREADS = 3, 64  # fewer than the chunks and vectors: a block and a thread each process several
GUARD = 16  # elements before and after every tensor that no kernel may touch
# The arguments of an operation's kernels after the table.
REST = {
    "qadam_update": QAdamStep((*NUMBERS.values(), 1.0 - NUMBERS["beta1"])),
    **dict.fromkeys(FORMS, QAdamForm((0.9, 0.1 / 1024))),
}
KEYWORDS = {"qadam_update": NUMBERS, **{form: {"beta1": 0.9, "share": 0.1 / 1024} for form in FORMS}}


def run(
    host_kernels: HostKernels, operation: str, dtype: torch.dtype, table: TensorTable, blocks: range, num_blocks: int
) -> None:
    kernel = f"torchbagua_{operation}_{str(dtype).split('.')[1]}"
    ended = host_kernels.run(
        kernel, table, REST[operation], blocks=blocks, num_blocks=num_blocks, num_threads=BLOCK_THREADS
    )
    assert ended == "done"


def lists_of(operation: str, dtype: torch.dtype, *, is_hostile: bool = False) -> list[list[Tensor]]:
    """Return an operation's lists, with tensors of LENGTHS elements; momenta have this dtype."""
    lists = arguments(dtype, is_hostile=is_hostile)
    return lists if operation == "qadam_update" else [arguments(torch.float32, is_hostile=is_hostile)[1], lists[2]]


def launch_table(lists: list[list[Tensor]], chunk_elements: int) -> TensorTable:
    """Return the table of a launch."""
    table = table_type(len(lists))(num_rows=len(lists[0]), chunk_elements=chunk_elements)
    for row, tensors in zip(table.rows, zip(*lists, strict=True), strict=False):
        row.pointers[:] = [tensor.data_ptr() for tensor in tensors]
        row.num_elements, row.first_chunk = tensors[0].numel(), table.num_chunks
        table.num_chunks += -(-tensors[0].numel() // chunk_elements)
    return table


def guard(tensor: Tensor, shift: int) -> Tensor:
    """Return a buffer with a copy between guards, `shift` elements past a vector-aligned address; see `inside`."""
    buffer = torch.full((tensor.numel() + 2 * GUARD + shift,), 7.0, dtype=tensor.dtype)
    assert buffer.data_ptr() % 16 == 0
    inside(buffer, shift).copy_(tensor)
    return buffer


def inside(buffer: Tensor, shift: int) -> Tensor:
    """Return the copy that `guard` made."""
    return buffer[GUARD + shift : -GUARD]


@pytest.mark.parametrize("operation", REST)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_give_the_bits_of_the_reference(host_kernels: HostKernels, operation: str, dtype: torch.dtype) -> None:
    num_lists = len(lists_of(operation, dtype))
    aligned, unaligned = [0] * num_lists, [1] * num_lists
    one_unaligned = [[int(i == shifted) for i in range(num_lists)] for shifted in range(num_lists)]
    for shifts, chunk_elements in [
        (aligned, 1024),
        (aligned, 1001),  # later chunks of an aligned tensor are not aligned
        (aligned, 2**20),
        *((shifts, 1024) for shifts in (unaligned, *one_unaligned)),
    ]:
        for is_hostile in (False, True):
            check_bits(host_kernels, operation, dtype, shifts, chunk_elements, is_hostile=is_hostile)


def check_bits(
    host_kernels: HostKernels,
    operation: str,
    dtype: torch.dtype,
    shifts: list[int],
    chunk_elements: int,
    *,
    is_hostile: bool,
) -> None:
    originals = lists_of(operation, dtype, is_hostile=is_hostile)
    # Tensors that are empty (LENGTHS[0]) come first, last and several in a row.
    order = [0, 1, 0, 0, *range(1, len(LENGTHS)), 0]

    def buffers() -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        whole = [[guard(own[i], shift) for i in order] for own, shift in zip(originals, shifts, strict=True)]
        return whole, [[inside(buffer, shift) for buffer in own] for own, shift in zip(whole, shifts, strict=True)]

    mine, tensors = buffers()
    theirs, of_reference = buffers()

    run(host_kernels, operation, dtype, launch_table(tensors, chunk_elements), range(NUM_BLOCKS), NUM_BLOCKS)

    NATIVE_OPS[operation](*of_reference, **KEYWORDS[operation])
    for own, expected in zip(mine, theirs, strict=True):
        assert all(map(same, own, expected)), (shifts, chunk_elements, is_hostile)
    if not is_hostile:
        assert not torch.equal(tensors[0][-2], originals[0][-1])


@pytest.mark.parametrize("operation", REST)
def test_nothing_to_do(host_kernels: HostKernels, operation: str) -> None:
    lists = [[] for _ in lists_of(operation, torch.float32)]
    run(host_kernels, operation, torch.float32, launch_table(lists, 1024), range(2), 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", REST)
def test_elements_beyond_32_bits(host_kernels: HostKernels, operation: str, dtype: torch.dtype) -> None:
    """The last chunk of a tensor of 2^33 + 1000 elements, of which only that chunk is in memory."""
    before, chunk_elements = 2**33, 1024
    tensors = [[own[LENGTHS.index(1000)]] for own in lists_of(operation, dtype)]
    theirs = [[tensor.clone() for tensor in own] for own in tensors]
    last = before // chunk_elements
    table = launch_table(tensors, chunk_elements)
    table.rows[0].pointers[:] = [tensor.data_ptr() - before * tensor.itemsize for (tensor,) in tensors]
    table.rows[0].num_elements, table.num_chunks = before + 1000, last + 1

    run(host_kernels, operation, dtype, table, range(last, last + 1), last + 1)

    NATIVE_OPS[operation](*theirs, **KEYWORDS[operation])
    for own, expected in zip(tensors, theirs, strict=True):
        assert all(map(same, own, expected))
