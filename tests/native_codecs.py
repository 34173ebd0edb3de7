"""The native codecs for the tests: their bytes, tables of blocks, hostile values, and checks of both kernels."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from devices import CPU, on_device
from torchbagua import native
from torchbagua.native.ops import NATIVE_OPS
from torchbagua.native.topk import index_bits

OPS = torch.ops.torchbagua
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
L = 128  # a block length of the tests: four of the kernels' 32 lanes
TILE = 4096  # elements: the kernels process longer blocks in several steps


@dataclass(frozen=True)
class Codec:
    """The bytes of a block, the prefix of the operations' names, and the device of the native kernels.

    The reference runs on the CPU, and all tensors of the tests are there. For a sparse codec, `kept_of_64` is the
    number of elements of 64 that the tests keep, `index_bytes` the size of a block's positions (None if each element
    has an index), and `longest` the longest block.
    """

    name: str
    header_bytes: int
    elements_per_byte: int
    device: torch.device = CPU
    kept_of_64: int | None = None
    index_bytes: int | None = None
    longest: int = 2**63 - 1

    def on(self, device: torch.device) -> "Codec":
        """Return the same codec with its kernels on `device`, which are loaded."""
        native.load()
        rows = [row for row in native.status() if row.device == device.type and row.operation.startswith(self.name)]
        assert rows
        assert not [row for row in rows if row.path == "reference"], rows
        return replace(self, device=device)

    def payload_bytes(self, length: int) -> int:
        """Return the payload bytes of a block of `length` elements."""
        kept = self.num_kept(length)
        return -(-length // self.elements_per_byte) if kept is None else self.bytes_of_kept(length, kept)

    def bytes_of_kept(self, length: int, kept: int) -> int:
        """Return the payload bytes of a block of `length` elements of which `kept` are kept."""
        packed = -(-kept * index_bits(length) // 8)
        return kept + (packed if self.index_bytes is None else self.index_bytes)

    def num_kept(self, length: int) -> int | None:
        """Return how many elements of a block of `length` elements are kept; None if all are."""
        return None if self.kept_of_64 is None else -(-length * self.kept_of_64 // 64)

    def row(self, start: int, length: int, header: int, payload: int) -> tuple[int, ...]:
        """Return a row of a table, with any numbers."""
        kept = self.num_kept(max(1, min(length, 2**31)))
        return (start, length, header, payload, *([] if kept is None else [kept]))

    def native(self, operation: str) -> torch._ops.OpOverload:
        """Return the operation itself, for tensors on any device."""
        return getattr(OPS, f"{self.name}_{operation}").default

    def kernels(self, operation: str) -> list[Callable[..., None]]:
        """Return the native kernel and the reference."""
        return [on_device(self.native(operation), self.device), NATIVE_OPS[f"{self.name}_{operation}"]]

    def opcheck(self, operation: str, *arguments: Any) -> None:
        """Check the operation's registration."""
        there = [value.to(self.device) if isinstance(value, Tensor) else value for value in arguments]
        torch.library.opcheck(self.native(operation), tuple(there))


MINMAX_UINT8 = Codec("minmax_uint8", header_bytes=8, elements_per_byte=1)
MINMAX_UINT4 = Codec("minmax_uint4", header_bytes=4, elements_per_byte=2)
SIGN_1BIT = Codec("sign1bit", header_bytes=4, elements_per_byte=8)
TOPK = Codec("topk", header_bytes=4, elements_per_byte=0, kept_of_64=8, longest=4096)
BLOCKK = replace(TOPK, name="blockk", index_bytes=2)
CODECS = (MINMAX_UINT8, MINMAX_UINT4, SIGN_1BIT, TOPK, BLOCKK)


def lay_out(codec: Codec, lengths: list[int], seed: int = 0) -> tuple[Tensor, int]:
    """Return a table of blocks of `lengths`, and its wire's size.

    Blocks are in any order in x, in the wire and in the table, with gaps between them.
    """
    generator = torch.Generator().manual_seed(seed)

    def place(sizes: list[int], unit: int) -> list[int]:
        offsets, offset = [0] * len(sizes), 0
        for index in torch.randperm(len(sizes), generator=generator).tolist():
            offset += unit * int(torch.randint(0, 3, (), generator=generator))
            offsets[index] = offset
            offset += sizes[index]
        return offsets

    start = place(lengths, 1)
    header = place([codec.header_bytes] * len(lengths), 4)
    first_payload = max(header, default=0) + codec.header_bytes
    sizes = [codec.payload_bytes(length) for length in lengths]
    payload = [first_payload + offset for offset in place(sizes, 1)]
    rows = [codec.row(*fields) for fields in zip(start, lengths, header, payload, strict=True)]
    table = torch.tensor(rows, dtype=torch.int64).view(len(rows), len(codec.row(0, 1, 0, 0)))
    return table, max((p + n for p, n in zip(payload, sizes, strict=True)), default=0) + 5


def num_elements(table: Tensor) -> int:
    """Return the size of an x that contains all blocks and a few elements more."""
    return int((table[:, 0] + table[:, 1]).max()) + 3 if len(table) else 0


def random_bits(count: int, seed: int) -> Tensor:
    """Return random float32 values of any bits: NaN, Inf, subnormals and all others."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32).view(torch.float32)


def hostile_values(kind: str, count: int, seed: int) -> Tensor:
    """Return `count` float32 values of one hostile kind."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(count, generator=generator)
    if kind == "any bits":
        return random_bits(count, seed)
    if kind == "finite bits":
        bits = random_bits(count, seed)
        return torch.where(bits.abs() < 2.0**126, bits, 1.0)
    if kind == "one not finite":
        bad = torch.tensor([torch.nan, torch.inf, -torch.inf, 2.0**126, -(2.0**127)])[seed % 5]
        normal[seed % max(count, 1) :][:1] = bad
        return normal
    if kind == "constant":
        return random_bits(1, seed).nan_to_num().clamp(-1e37, 1e37).repeat(count)
    if kind == "zeros":
        return torch.where(normal > 0, 0.0, -0.0)
    if kind == "subnormal":
        return normal * 1e-39
    if kind == "offset":
        return 1e3 + normal * 1e-3
    if kind == "one sign":
        return normal.abs() + 1e-3
    return normal * 10.0 ** ((seed % 77) - 38)  # "scaled": 1e-38 to 1e38


KINDS = ("scaled", "any bits", "finite bits", "one not finite", "constant", "zeros", "subnormal", "offset", "one sign")
lengths_of_blocks = st.lists(st.sampled_from((1, 2, 31, 32, 33, L - 1, L, L + 1, 3 * L)), max_size=6)
seeds = st.integers(0, 2**31)
several = settings(max_examples=min(60, settings.default.max_examples), deadline=None)


def assert_same_values(got: Tensor, expected: Tensor) -> None:
    """Assert equal bits, but accept any NaN for a NaN: its payload depends on the processor."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    same = (got.view(bits) == expected.view(bits)) | (got.isnan() & expected.isnan())
    assert same.all(), (got[~same], expected[~same])


def encoded_by_both(codec: Codec, x: Tensor, table: Tensor, wire_bytes: int, seed: int = 0) -> Tensor:
    """Return the wire of x. Assert that native and reference agree on it, padding (random here) included."""
    before = torch.randint(0, 256, (wire_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    wires = before.clone(), before.clone()
    for encode, wire in zip(codec.kernels("encode"), wires, strict=True):
        encode(x, table, wire)
    assert torch.equal(*wires)
    return wires[0]


def decoded_by_both(codec: Codec, wire: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the x of a wire. Assert that native and reference agree on it; elements between the blocks are 7."""
    outputs = [torch.full((num_elements(table),), 7.0, dtype=dtype) for _ in range(2)]
    for decode, output in zip(codec.kernels("decode"), outputs, strict=True):
        decode(wire, table, output)
    assert_same_values(*outputs)
    return outputs[0]


def mean_by_both(codec: Codec, rows: Tensor, table: Tensor, divisor: float) -> Tensor:
    """Return the wire of the mean of rows. Assert that native and reference agree; bytes between the blocks are 7."""
    wires = [torch.full_like(rows[0], 7) for _ in range(2)]
    for decode_mean_encode, wire in zip(codec.kernels("decode_mean_encode"), wires, strict=True):
        decode_mean_encode(rows, table, divisor, wire)
    assert torch.equal(*wires)
    return wires[0]


def assert_header_decodes_to_nan(codec: Codec, values: list[float], dtype: torch.dtype) -> None:
    """Assert that a block with this header decodes to NaN, and a mean with it has a NaN header and a zero payload."""
    table, wire_bytes = lay_out(codec, [L])
    start, _, header, payload, *_ = table[0].tolist()
    wire = torch.arange(wire_bytes).to(torch.uint8)
    wire[header : header + codec.header_bytes] = torch.tensor(values).view(torch.uint8)

    assert decoded_by_both(codec, wire, table, dtype)[start : start + L].isnan().all()
    mean = mean_by_both(codec, torch.stack((wire, wire)), table, 2.0)
    assert mean[header : header + codec.header_bytes].view(torch.float32).isnan().all()
    assert not mean[payload : payload + codec.payload_bytes(L)].any()


def feedback_by_both(
    codec: Codec, x: Tensor, residual: Tensor, table: Tensor, wire_bytes: int
) -> tuple[Tensor, Tensor]:
    """Return wire and left_out of x with a residual. Assert that both kernels agree; between the blocks both are 7."""
    results = []
    for kernel in codec.kernels("encode_feedback"):
        wire, left_out = torch.full((wire_bytes,), 7, dtype=torch.uint8), torch.full_like(x, 7.0)
        kernel(x, residual, table, wire, left_out)
        results.append((wire, left_out))
    (wire, left_out), (reference_wire, reference_left_out) = results
    assert torch.equal(wire, reference_wire)
    assert_same_values(left_out, reference_left_out)
    return wire, left_out


def assert_mean_feedback_is_both_in_turn(codec: Codec, rows: Tensor, residual: Tensor, table: Tensor) -> None:
    """Assert that the mean of rows with a residual has the bytes of mean, then feedback; the gaps are 7."""
    mean, left_out = torch.full_like(residual, 7.0), torch.full_like(residual, 7.0)
    wire = torch.full_like(rows[0], 7)
    NATIVE_OPS[f"{codec.name}_decode_mean"](rows, table, 3.0, mean)
    NATIVE_OPS[f"{codec.name}_encode_feedback"](mean, residual, table, wire, left_out)
    for kernel in codec.kernels("decode_mean_encode_feedback"):
        own_wire, own_left_out = torch.full_like(wire, 7), torch.full_like(left_out, 7.0)
        kernel(rows, table, 3.0, residual, own_wire, own_left_out)
        assert torch.equal(own_wire, wire)
        assert_same_values(own_left_out, left_out)
