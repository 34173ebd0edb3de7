"""The CUDA kernels of the codecs that send all elements, on the host.

Their results are bitwise equal to the reference's for any values, addresses and lengths.
"""

from itertools import product

import pytest
import torch
from torch import Tensor

from host_kernels import HostKernels, Span
from native_codecs import (
    DTYPES,
    KINDS,
    MINMAX_UINT4,
    MINMAX_UINT8,
    SIGN_1BIT,
    Codec,
    assert_same_values,
    hostile_values,
    lay_out,
    num_elements,
)
from torchbagua.native.ops import NATIVE_OPS

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
NUM_THREADS = 64
GRID = 3  # fewer than the blocks of most tables: a thread block, or a team of its threads, processes several
TILES = {MINMAX_UINT8: 2048, MINMAX_UINT4: 128, SIGN_1BIT: 2048}  # the most elements that a team holds
GUARD = 64  # bytes before and after the memory that a kernel may access


class Guarded:
    """A copy of a tensor between guards; it begins `shift` elements after an address aligned for all vectors."""

    def __init__(self, tensor: Tensor, shift: int) -> None:
        guard = GUARD // tensor.element_size()
        self._memory = torch.full((tensor.numel() + 2 * guard + shift,), 7, dtype=tensor.dtype)
        assert self._memory.data_ptr() % 64 == 0
        self._inside = slice(guard + shift, guard + shift + tensor.numel())
        self.tensor = self._memory[self._inside].view(tensor.shape)
        self.tensor.copy_(tensor)

    def is_intact(self) -> bool:
        """Return whether the guards are unchanged."""
        outside = self._memory.clone()
        outside[self._inside] = 7
        return bool((outside == 7).all())


@pytest.fixture(params=TILES, ids=lambda codec: codec.name)
def codec(request: pytest.FixtureRequest) -> Codec:
    return request.param


def run(host_kernels: HostKernels, codec: Codec, name: str, *arguments: object) -> str:
    return host_kernels.run(
        f"torchbagua_{codec.name}_{name}", *arguments, blocks=range(GRID), num_blocks=GRID, num_threads=NUM_THREADS
    )


def tables(codec: Codec) -> list[tuple[Tensor, int]]:
    """Return tables, of blocks in any order with gaps and of aligned blocks as usual, and their wires' bytes."""
    tile = TILES[codec]
    lengths = [1, 7, 16, 130, tile - 8, tile, tile, tile + 1, 2 * tile + 24]
    if codec is MINMAX_UINT4:  # more blocks than teams
        lengths *= 4
    payload = codec.payload_bytes(tile)
    dense = torch.tensor([[i * tile, tile, codec.header_bytes * i, 32 + i * payload] for i in range(4)])
    return [lay_out(codec, lengths, seed=3), (dense, 32 + 4 * payload)]


def values_of(kind: str, table: Tensor) -> Tensor:
    """Return an x with values of this kind in every block, each with a different seed."""
    x = torch.zeros(num_elements(table))
    for seed, (start, length, *_) in enumerate(table.tolist()):
        x[start : start + length] = hostile_values(kind, length, seed)
    return x


def wires(codec: Codec, kinds: tuple[str, ...], table: Tensor, wire_bytes: int) -> Tensor:
    """Return a wire for each kind of values, and a wire of random bytes."""
    rows = torch.randint(0, 256, (len(kinds) + 1, wire_bytes), dtype=torch.uint8)
    for kind, row in zip(kinds, rows, strict=False):
        NATIVE_OPS[f"{codec.name}_encode"](values_of(kind, table), table, row)
    return rows


SHIFTS = [(1, 0), (0, 1), (0, 4), (3, 8)]  # elements of x, bytes of the wire


def shifts_of(kind: str) -> list[tuple[int, int]]:
    """Return no shifts, and one of SHIFTS; over all kinds of values, each of SHIFTS is used several times."""
    return [(0, 0), SHIFTS[[*KINDS, "any wire"].index(kind) % len(SHIFTS)]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_encode(host_kernels: HostKernels, codec: Codec, dtype: torch.dtype, kind: str) -> None:
    for (table, wire_bytes), (x_shift, wire_shift) in product(tables(codec), shifts_of(kind)):
        x = Guarded(values_of(kind, table).to(dtype), x_shift)
        wire = Guarded(torch.full((wire_bytes,), 9, dtype=torch.uint8), wire_shift)
        expected = torch.full_like(wire.tensor, 9)
        NATIVE_OPS[f"{codec.name}_encode"](x.tensor, table, expected)
        name = f"encode_{NAMES[dtype]}"
        assert run(host_kernels, codec, name, x.tensor, table, wire.tensor) == "done"
        assert torch.equal(wire.tensor, expected)
        assert wire.is_intact()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*KINDS, "any wire"])
def test_decode(host_kernels: HostKernels, codec: Codec, dtype: torch.dtype, kind: str) -> None:
    for (table, wire_bytes), (x_shift, wire_shift) in product(tables(codec), shifts_of(kind)):
        row = wires(codec, (kind,), table, wire_bytes)[0] if kind in KINDS else wires(codec, (), table, wire_bytes)[0]
        wire = Guarded(row, wire_shift)
        x = Guarded(torch.full((num_elements(table),), 9.0, dtype=dtype), x_shift)
        expected = torch.full_like(x.tensor, 9.0)
        NATIVE_OPS[f"{codec.name}_decode"](wire.tensor, table, expected)
        name = f"decode_{NAMES[dtype]}"
        assert run(host_kernels, codec, name, wire.tensor, table, x.tensor) == "done"
        assert_same_values(x.tensor, expected)
        assert x.is_intact()


SENDERS = {
    "one": ("scaled",),
    "eight": ("scaled", "finite bits", "constant", "zeros", "subnormal", "offset", "one sign", "scaled"),
    "forty": ("scaled", "offset", "subnormal", "zeros", "one sign") * 8,  # more than the first 32 rows
    "zeros": ("zeros", "zeros"),  # the mean may be -0
    "one not finite": ("scaled", "one not finite", "offset"),
}
DIVISORS = [1.0, 8.0, 3.0, 2.0**-126, 1e38]


@pytest.mark.parametrize(
    ("senders", "divisor"), [*(("eight", divisor) for divisor in DIVISORS), *((name, 40.0) for name in SENDERS)]
)
def test_means(host_kernels: HostKernels, codec: Codec, senders: str, divisor: float) -> None:
    for (table, wire_bytes), shift in product(tables(codec), (0, 1)):
        rows = Guarded(wires(codec, SENDERS[senders], table, wire_bytes)[:-1], shift)
        arguments = (rows.tensor, table, divisor)

        wire = Guarded(torch.full((wire_bytes,), 9, dtype=torch.uint8), shift)
        expected = torch.full_like(wire.tensor, 9)
        NATIVE_OPS[f"{codec.name}_decode_mean_encode"](rows.tensor, table, divisor, expected)
        assert run(host_kernels, codec, "decode_mean_encode", *arguments, wire.tensor) == "done"
        assert torch.equal(wire.tensor, expected)
        assert wire.is_intact()

        x = Guarded(torch.full((num_elements(table),), 9.0), shift)
        expected = torch.full_like(x.tensor, 9.0)
        NATIVE_OPS[f"{codec.name}_decode_mean"](rows.tensor, table, divisor, expected)
        assert run(host_kernels, codec, "decode_mean_float32", *arguments, x.tensor) == "done"
        assert_same_values(x.tensor, expected)
        assert x.is_intact()


@pytest.mark.parametrize("kind", KINDS)
def test_encode_feedback(host_kernels: HostKernels, codec: Codec, kind: str) -> None:
    for (table, wire_bytes), shifts in product(tables(codec), [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 4)]):
        values = values_of(kind, table)
        x, residual = Guarded(values, shifts[0]), Guarded(values.flip(0) / 256, shifts[1])
        left_out = Guarded(torch.full_like(values, 9.0), shifts[2])
        wire = Guarded(torch.full((wire_bytes,), 9, dtype=torch.uint8), shifts[3])
        expected = torch.full_like(wire.tensor, 9), torch.full_like(values, 9.0)
        NATIVE_OPS[f"{codec.name}_encode_feedback"](x.tensor, residual.tensor, table, *expected)
        arguments = (x.tensor, residual.tensor, table, wire.tensor, left_out.tensor)
        assert run(host_kernels, codec, "encode_feedback_float32", *arguments) == "done"
        assert torch.equal(wire.tensor, expected[0])
        assert_same_values(left_out.tensor, expected[1])
        assert wire.is_intact()
        assert left_out.is_intact()


OUTSIDE_X = [(1, 100, 0, 8), (-1, 100, 0, 8), (2**62, 100, 0, 8)]
OUTSIDE_WIRE = [(0, 100, 2, 8), (0, 100, 104, 8), (0, 100, -4, 8), (0, 100, 0, 9), (0, 100, 0, -1)]
NO_LENGTH = [(0, 0, 0, 8), (0, -1, 0, 8), (0, 2**62, 0, 8)]


@pytest.mark.parametrize("row", [*OUTSIDE_X, *OUTSIDE_WIRE, *NO_LENGTH])
def test_a_block_outside_its_tensors_traps(host_kernels: HostKernels, codec: Codec, row: tuple[int, ...]) -> None:
    x, wire = torch.zeros(100), torch.zeros(8 + codec.payload_bytes(100), dtype=torch.uint8)
    for table, outcome in ((torch.tensor([[0, 100, 0, 8]]), "done"), (torch.tensor([row]), "trapped")):
        assert run(host_kernels, codec, "encode_float32", x, table, wire) == outcome
        assert run(host_kernels, codec, "decode_float32", wire, table, x) == outcome
        if row not in OUTSIDE_X:
            assert run(host_kernels, codec, "decode_mean_encode", wire[None], table, 1.0, wire.clone()) == outcome


def test_an_empty_table_does_nothing(host_kernels: HostKernels, codec: Codec) -> None:
    table = torch.zeros(0, 4, dtype=torch.int64)
    assert (
        run(host_kernels, codec, "encode_float32", torch.zeros(1), table, torch.zeros(1, dtype=torch.uint8)) == "done"
    )


def test_blocks_beyond_32_bits(host_kernels: HostKernels, codec: Codec) -> None:
    """The last block of 2^33 elements; only that block is in memory."""
    before, tile, payload = 2**33, TILES[codec], codec.payload_bytes(TILES[codec])
    x, wire = torch.randn(tile), torch.zeros(8 + payload, dtype=torch.uint8)
    table = torch.tensor([[before, tile, before, before + 8]])
    whole_x = Span(x.data_ptr() - 4 * before, before + tile)
    whole_wire = Span(wire.data_ptr() - before, before + 8 + payload)
    expected = torch.zeros_like(wire)
    NATIVE_OPS[f"{codec.name}_encode"](x, torch.tensor([[0, tile, 0, 8]]), expected)
    assert run(host_kernels, codec, "encode_float32", whole_x, table, whole_wire) == "done"
    assert torch.equal(wire, expected)
    assert run(host_kernels, codec, "decode_float32", whole_wire, table, whole_x) == "done"
    decoded = torch.zeros(tile)
    NATIVE_OPS[f"{codec.name}_decode"](expected, torch.tensor([[0, tile, 0, 8]]), decoded)
    assert torch.equal(x, decoded)
