"""The CUDA kernels of MinMaxUInt8, on the host: the bytes of the reference for any values, addresses and lengths."""

from itertools import product

import pytest
import torch
from torch import Tensor

from host_kernels import HostKernels, Span
from native_codecs import DTYPES, KINDS, MINMAX_UINT8, assert_same_values, hostile_values, lay_out, num_elements
from torchbagua.native.ops import NATIVE_OPS

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
NUM_THREADS = 64
TILE = 2048  # elements that a thread block holds
GRID = 3  # fewer than the blocks of most tables: a thread block takes several
LENGTHS = [1, 7, 16, 130, TILE - 8, TILE, TILE, TILE + 1, 2 * TILE + 24]
GUARD = 64  # bytes before and after what a kernel may touch


class Guarded:
    """A copy of a tensor that begins `shift` elements beyond an address that all vectors fit, between guards."""

    def __init__(self, tensor: Tensor, shift: int) -> None:
        guard = GUARD // tensor.element_size()
        self._memory = torch.full((tensor.numel() + 2 * guard + shift,), 7, dtype=tensor.dtype)
        assert self._memory.data_ptr() % 64 == 0
        self._inside = slice(guard + shift, guard + shift + tensor.numel())
        self.tensor = self._memory[self._inside].view(tensor.shape)
        self.tensor.copy_(tensor)

    def is_intact(self) -> bool:
        """Return whether the guards are as they were."""
        outside = self._memory.clone()
        outside[self._inside] = 7
        return bool((outside == 7).all())


def run(host_kernels: HostKernels, name: str, *arguments: object) -> str:
    return host_kernels.run(
        f"torchbagua_minmax_uint8_{name}", *arguments, blocks=range(GRID), num_blocks=GRID, num_threads=NUM_THREADS
    )


def tables() -> list[tuple[Tensor, int]]:
    """Of blocks in any order with gaps, and of aligned ones as most layouts have them; with their wires' bytes."""
    dense = torch.tensor([[i * TILE, TILE, 8 * i, 32 + i * TILE] for i in range(4)])
    return [lay_out(MINMAX_UINT8, LENGTHS, seed=3), (dense, 32 + 4 * TILE)]


def values_of(kind: str, table: Tensor) -> Tensor:
    """Such values in every block, of a seed of its own."""
    x = torch.zeros(num_elements(table))
    for seed, (start, length, *_) in enumerate(table.tolist()):
        x[start : start + length] = hostile_values(kind, length, seed)
    return x


def wires(kinds: tuple[str, ...], table: Tensor, wire_bytes: int) -> Tensor:
    """One for each kind of values, and one of any bytes."""
    rows = torch.randint(0, 256, (len(kinds) + 1, wire_bytes), dtype=torch.uint8)
    for kind, row in zip(kinds, rows, strict=False):
        NATIVE_OPS["minmax_uint8_encode"](values_of(kind, table), table, row)
    return rows


SHIFTS = [(0, 0), (1, 0), (0, 1), (0, 4), (3, 8)]  # elements of x, bytes of the wire


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_encode(host_kernels: HostKernels, dtype: torch.dtype, kind: str) -> None:
    for (table, wire_bytes), (x_shift, wire_shift) in product(tables(), SHIFTS):
        x = Guarded(values_of(kind, table).to(dtype), x_shift)
        wire = Guarded(torch.full((wire_bytes,), 9, dtype=torch.uint8), wire_shift)
        expected = torch.full_like(wire.tensor, 9)
        NATIVE_OPS["minmax_uint8_encode"](x.tensor, table, expected)
        name = f"encode_{NAMES[dtype]}"
        assert run(host_kernels, name, x.tensor, table, wire.tensor) == "done"
        assert torch.equal(wire.tensor, expected)
        assert wire.is_intact()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*KINDS, "any wire"])
def test_decode(host_kernels: HostKernels, dtype: torch.dtype, kind: str) -> None:
    for (table, wire_bytes), (x_shift, wire_shift) in product(tables(), SHIFTS):
        row = wires((kind,), table, wire_bytes)[0] if kind in KINDS else wires((), table, wire_bytes)[0]
        wire = Guarded(row, wire_shift)
        x = Guarded(torch.full((num_elements(table),), 9.0, dtype=dtype), x_shift)
        expected = torch.full_like(x.tensor, 9.0)
        NATIVE_OPS["minmax_uint8_decode"](wire.tensor, table, expected)
        name = f"decode_{NAMES[dtype]}"
        assert run(host_kernels, name, wire.tensor, table, x.tensor) == "done"
        assert_same_values(x.tensor, expected)
        assert x.is_intact()


SENDERS = {
    "one": ("scaled",),
    "eight": ("scaled", "finite bits", "constant", "zeros", "subnormal", "offset", "one sign", "scaled"),
    "forty": ("scaled", "offset", "subnormal", "zeros") * 10,
    "one not finite": ("scaled", "one not finite", "offset"),
}
DIVISORS = [1.0, 8.0, 3.0, 2.0**-126, 1e38]


@pytest.mark.parametrize(
    ("senders", "divisor"), [*(("eight", divisor) for divisor in DIVISORS), *((name, 40.0) for name in SENDERS)]
)
def test_means(host_kernels: HostKernels, senders: str, divisor: float) -> None:
    for (table, wire_bytes), shift in product(tables(), (0, 1)):
        rows = Guarded(wires(SENDERS[senders], table, wire_bytes)[:-1], shift)
        arguments = (rows.tensor, table, divisor)

        wire = Guarded(torch.full((wire_bytes,), 9, dtype=torch.uint8), shift)
        expected = torch.full_like(wire.tensor, 9)
        NATIVE_OPS["minmax_uint8_decode_mean_encode"](rows.tensor, table, divisor, expected)
        assert run(host_kernels, "decode_mean_encode", *arguments, wire.tensor) == "done"
        assert torch.equal(wire.tensor, expected)
        assert wire.is_intact()

        x = Guarded(torch.full((num_elements(table),), 9.0), shift)
        expected = torch.full_like(x.tensor, 9.0)
        NATIVE_OPS["minmax_uint8_decode_mean"](rows.tensor, table, divisor, expected)
        assert run(host_kernels, "decode_mean_float32", *arguments, x.tensor) == "done"
        assert_same_values(x.tensor, expected)
        assert x.is_intact()


@pytest.mark.parametrize("kind", KINDS)
def test_encode_feedback(host_kernels: HostKernels, kind: str) -> None:
    for (table, wire_bytes), shifts in product(tables(), [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 4)]):
        values = values_of(kind, table)
        x, residual = Guarded(values, shifts[0]), Guarded(values.flip(0) / 256, shifts[1])
        left_out = Guarded(torch.full_like(values, 9.0), shifts[2])
        wire = Guarded(torch.full((wire_bytes,), 9, dtype=torch.uint8), shifts[3])
        expected = torch.full_like(wire.tensor, 9), torch.full_like(values, 9.0)
        NATIVE_OPS["minmax_uint8_encode_feedback"](x.tensor, residual.tensor, table, *expected)
        arguments = (x.tensor, residual.tensor, table, wire.tensor, left_out.tensor)
        assert run(host_kernels, "encode_feedback_float32", *arguments) == "done"
        assert torch.equal(wire.tensor, expected[0])
        assert_same_values(left_out.tensor, expected[1])
        assert wire.is_intact()
        assert left_out.is_intact()


OUTSIDE_X = [(1, 100, 0, 8), (-1, 100, 0, 8), (2**62, 100, 0, 8)]
OUTSIDE_WIRE = [(0, 100, 2, 8), (0, 100, 104, 8), (0, 100, -4, 8), (0, 100, 0, 9), (0, 100, 0, -1)]
NO_LENGTH = [(0, 0, 0, 8), (0, -1, 0, 8), (0, 2**62, 0, 8)]


@pytest.mark.parametrize("row", [*OUTSIDE_X, *OUTSIDE_WIRE, *NO_LENGTH])
def test_a_block_outside_its_tensors_traps(host_kernels: HostKernels, row: tuple[int, ...]) -> None:
    x, wire = torch.zeros(100), torch.zeros(108, dtype=torch.uint8)
    for table, outcome in ((torch.tensor([[0, 100, 0, 8]]), "done"), (torch.tensor([row]), "trapped")):
        assert run(host_kernels, "encode_float32", x, table, wire) == outcome
        assert run(host_kernels, "decode_float32", wire, table, x) == outcome
        if row not in OUTSIDE_X:
            assert run(host_kernels, "decode_mean_encode", wire[None], table, 1.0, wire.clone()) == outcome


def test_an_empty_table_does_nothing(host_kernels: HostKernels) -> None:
    table = torch.zeros(0, 4, dtype=torch.int64)
    assert run(host_kernels, "encode_float32", torch.zeros(1), table, torch.zeros(1, dtype=torch.uint8)) == "done"


def test_blocks_beyond_32_bits(host_kernels: HostKernels) -> None:
    """The last block of 2^33 elements, of which only that block is in memory."""
    before = 2**33
    x, wire = torch.randn(TILE), torch.zeros(8 + TILE, dtype=torch.uint8)
    table = torch.tensor([[before, TILE, before, before + 8]])
    whole_x = Span(x.data_ptr() - 4 * before, before + TILE)
    whole_wire = Span(wire.data_ptr() - before, before + 8 + TILE)
    expected = torch.zeros_like(wire)
    NATIVE_OPS["minmax_uint8_encode"](x, torch.tensor([[0, TILE, 0, 8]]), expected)
    assert run(host_kernels, "encode_float32", whole_x, table, whole_wire) == "done"
    assert torch.equal(wire, expected)
    assert run(host_kernels, "decode_float32", whole_wire, table, whole_x) == "done"
    decoded = torch.zeros(TILE)
    NATIVE_OPS["minmax_uint8_decode"](expected, torch.tensor([[0, TILE, 0, 8]]), decoded)
    assert torch.equal(x, decoded)
