"""Code shared by the block-wise codecs: the operations over block tables, in plain torch.

A *block table* is an int64 tensor [B, 4] on the device of the data, one row per block: `start`, the offset of the block
in x, in elements; `length`, its number of elements, at least 1; `header`, the offset of its header bytes in the wire, a
multiple of 4; `payload`, the offset of its payload bytes in the wire. The table of a sparse codec is [B, 5]; the fifth
field, `kept`, is the number of elements of the block that are sent. The blocks of one table must not write overlapping
ranges, and a tensor that is written must not overlap a tensor that is read: the result would depend on the kernel.

Blocks of equal length are encoded and decoded together, as the rows of one matrix. Shapes: K blocks, L elements,
H header bytes, P payload bytes; x: [N] float32, bfloat16 or float16; wire: [W] uint8; rows: [R, W], one wire for each
sender.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from torchbagua.native.ops import (
    DIVISOR,
    ELEMENTS,
    FLOATS,
    ROWS,
    TABLE,
    WIRE,
    TensorKind,
    check_arguments,
    define_op,
    refusal,
)

_DENSE_FIELDS = 4

UNUSABLE_MAGNITUDE = 0x7E800000  # bits of 2^126: codecs reject magnitudes from 2^126 on
NARROWEST = 2.0**-118  # codecs encode narrower ranges, and smaller magnitudes, as if they were zero
_ROUNDING_SHIFT = 12582912.0  # 1.5 * 2^23


def is_usable(magnitudes: Tensor) -> Tensor:
    """Return which of these float32 are magnitudes that codecs do not reject."""
    bits = magnitudes.view(torch.int32)
    return (bits >= 0) & (bits < UNUSABLE_MAGNITUDE)


def round_half_even(values: Tensor) -> Tensor:
    return (values + _ROUNDING_SHIFT) - _ROUNDING_SHIFT


class Group(NamedTuple):
    """Blocks of one shape: indices of elements in x [K, L], and of headers [K, H] and payloads [K, P] in a wire.

    `kept` is the number of elements sent per block; all of them if the codec is not sparse.
    """

    elements: Tensor
    header: Tensor
    payload: Tensor
    kept: int


class TableFormat(ABC):
    """The operations of a codec over block tables. A subclass defines how blocks of one shape are read and written.

    Attributes:
        name: the prefix of its operations' names.
        header_bytes: the size of a block's header, a multiple of 4.
        table: the kind of its block tables.
    """

    name: ClassVar[str]
    header_bytes: ClassVar[int]
    table: ClassVar[TensorKind] = TABLE

    @abstractmethod
    def payload_sizes(self, table: Tensor) -> Tensor:
        """Return the payload bytes of each block of a table."""

    @abstractmethod
    def read(self, wire: Tensor, group: Group) -> Tensor:
        """Return the blocks [K, L] float32 decoded from a wire."""

    @abstractmethod
    def write(self, wire: Tensor, group: Group, values_kl: Tensor) -> None:
        """Write the headers and payloads of blocks [K, L] float32."""

    def allowed_rows(self) -> str:
        """Describe a valid row of a table, for an error message."""
        return "rows (start, length >= 1, header at a multiple of 4, payload)"

    def are_allowed(self, table: Tensor) -> Tensor:
        """Return which rows of a table are valid, apart from their offsets."""
        return (table[:, 1] >= 1) & (table[:, 2] % 4 == 0)

    def encode(self, x: Tensor, table: Tensor, wire: Tensor) -> None:
        """Read x and write the header and payload of every block; other bytes of the wire do not change."""
        for group in self._groups("encode", table, x.numel(), wire.numel()):
            self.write(wire, group, x[group.elements].to(torch.float32))

    def decode(self, wire: Tensor, table: Tensor, x: Tensor) -> None:
        """Read the wire and write x: float32 arithmetic, rounded to the dtype of x at the end."""
        for group in self._groups("decode", table, x.numel(), wire.numel()):
            x[group.elements] = self.read(wire, group).to(x.dtype)

    def decode_mean(self, rows: Tensor, table: Tensor, divisor: float, x: Tensor) -> None:
        """Decode all rows, sum them in float32 in row order, divide by `divisor` in float32, and write x, float32."""
        for group in self._groups("decode_mean", table, x.numel(), rows.shape[1]):
            x[group.elements] = self._mean(rows, group, divisor)

    def decode_mean_encode(self, rows: Tensor, table: Tensor, divisor: float, wire: Tensor) -> None:
        """Encode the mean of the rows to a wire as long as one row; the `start` of a block is not used."""
        for group in self._groups("decode_mean_encode", table, None, wire.numel()):
            self.write(wire, group, self._mean(rows, group, divisor))

    def encode_feedback(self, x: Tensor, residual: Tensor, table: Tensor, wire: Tensor, left_out: Tensor) -> None:
        """Encode x + residual, float32, and write the new residual to left_out, at the elements of the blocks."""
        for group in self._groups("encode_feedback", table, x.numel(), wire.numel()):
            self._write_sum(wire, group, x[group.elements] + residual[group.elements], left_out)

    def decode_mean_encode_feedback(
        self, rows: Tensor, table: Tensor, divisor: float, residual: Tensor, wire: Tensor, left_out: Tensor
    ) -> None:
        """Encode the mean of the rows + residual to a wire as long as a row; write the new residual to left_out."""
        for group in self._groups("decode_mean_encode_feedback", table, residual.numel(), wire.numel()):
            self._write_sum(wire, group, self._mean(rows, group, divisor) + residual[group.elements], left_out)

    def _write_sum(self, wire: Tensor, group: Group, sum_kl: Tensor, left_out: Tensor) -> None:
        self.write(wire, group, sum_kl)
        left_out[group.elements] = sum_kl - self.read(wire, group)

    def _groups(self, operation: str, table: Tensor, num_elements: int | None, wire_bytes: int) -> Iterator[Group]:
        """Yield groups of blocks of one shape; ValueError for a block outside the wire, or outside of x."""
        self._check_blocks(operation, table, num_elements, wire_bytes)
        header_offsets = torch.arange(self.header_bytes, device=table.device)
        alike = table[:, [1, *range(_DENSE_FIELDS, table.shape[1])]]
        for kind in alike.unique(dim=0):
            blocks = table[(alike == kind).all(dim=1)]
            length, *kept = kind.tolist()
            offsets = torch.arange(length, device=table.device)
            payload_offsets = torch.arange(int(self.payload_sizes(blocks[:1])), device=table.device)
            yield Group(
                blocks[:, :1] + offsets,
                blocks[:, 2:3] + header_offsets,
                blocks[:, 3:4] + payload_offsets,
                kept[0] if kept else length,
            )

    def _check_blocks(self, operation: str, table: Tensor, num_elements: int | None, wire_bytes: int) -> None:
        start, length, header, payload = table.unbind(1)[:_DENSE_FIELDS]
        good = self.are_allowed(table)
        payload_bytes = self.payload_sizes(torch.where(good[:, None], table, 1))
        good &= (header >= 0) & (header <= wire_bytes - self.header_bytes)
        good &= (payload_bytes <= wire_bytes) & (payload >= 0) & (payload <= wire_bytes - payload_bytes)
        if num_elements is not None:
            good &= (length <= num_elements) & (start >= 0) & (start <= num_elements - length)
        if not bool(good.all()):
            row = int((~good).nonzero()[0])
            elements = "" if num_elements is None else f"{num_elements} elements of x and "
            allowed = f"{self.allowed_rows()} of blocks within {elements}{wire_bytes} bytes of wire"
            got = f"row {row} = {tuple(table[row].tolist())}"
            raise refusal(f"{self.name}_{operation}", "table", allowed, got)

    def _mean(self, rows: Tensor, group: Group, divisor: float) -> Tensor:
        """Return the mean [K, L] float32 of the blocks over all rows."""
        total_kl = self.read(rows[0], group)
        for row in rows[1:]:
            total_kl = total_kl + self.read(row, group)
        return torch.div(total_kl, torch.full_like(total_kl, divisor))


class BlockFormat(TableFormat):
    """The wire encoding of a codec with payload sizes that depend only on block lengths. A subclass codes blocks."""

    @abstractmethod
    def payload_bytes(self, lengths: Tensor) -> Tensor:
        """Return the payload bytes of blocks of `lengths` elements."""

    @abstractmethod
    def most_bytes(self, num_elements: int, num_blocks: int) -> int:
        """Return the maximum header and payload bytes of `num_blocks` blocks with `num_elements` elements in total."""

    @abstractmethod
    def encode_rows(self, values_kl: Tensor) -> tuple[Tensor, Tensor]:
        """Return the headers [K, H] and payloads [K, P] uint8 of K blocks [K, L] float32."""

    @abstractmethod
    def decode_rows(self, headers_kh: Tensor, payloads_kp: Tensor, length: int) -> Tensor:
        """Return the K blocks [K, length] float32; NaN for a block with a header that no encoder writes."""

    def payload_sizes(self, table: Tensor) -> Tensor:
        return self.payload_bytes(table[:, 1])

    def read(self, wire: Tensor, group: Group) -> Tensor:
        return self.decode_rows(wire[group.header], wire[group.payload], group.elements.shape[1])

    def write(self, wire: Tensor, group: Group, values_kl: Tensor) -> None:
        wire[group.header], wire[group.payload] = self.encode_rows(values_kl)


# The operations, methods of TableFormat: the kinds of their arguments, in order, and the arguments that they write.
_OPERATIONS: dict[str, tuple[dict[str, TensorKind | None], tuple[str, ...]]] = {
    "encode": ({"x": ELEMENTS, "table": TABLE, "wire": WIRE}, ("wire",)),
    "decode": ({"wire": WIRE, "table": TABLE, "x": ELEMENTS}, ("x",)),
    "decode_mean": ({"rows": ROWS, "table": TABLE, "divisor": DIVISOR, "x": FLOATS}, ("x",)),
    "decode_mean_encode": ({"rows": ROWS, "table": TABLE, "divisor": DIVISOR, "wire": WIRE}, ("wire",)),
    "encode_feedback": (
        {"x": FLOATS, "residual": FLOATS, "table": TABLE, "wire": WIRE, "left_out": FLOATS},
        ("wire", "left_out"),
    ),
    "decode_mean_encode_feedback": (
        {"rows": ROWS, "table": TABLE, "divisor": DIVISOR, "residual": FLOATS, "wire": WIRE, "left_out": FLOATS},
        ("wire", "left_out"),
    ),
}

# On a GPU, callers run decode_mean and encode_feedback one after the other.
_CPU_ONLY = {"decode_mean_encode_feedback"}

# The codecs by name. Filled at import: __init__.py imports their modules, which register them.
CODECS: dict[str, BlockFormat] = {}


def register_codec(codec: BlockFormat) -> None:
    """Register the operations `torchbagua::<name>_encode` and so on of a codec: the last line of its module."""
    CODECS[codec.name] = codec
    define_operations(codec)


def define_operations(codec: TableFormat) -> None:
    """Define the operations of a codec."""
    for suffix, (dense_kinds, writes) in _OPERATIONS.items():
        kinds = {**dense_kinds, "table": codec.table}
        check = functools.partial(check_arguments, f"{codec.name}_{suffix}", kinds)
        define_op(codec.name, suffix, check, getattr(codec, suffix), writes, is_cpu_only=suffix in _CPU_ONLY)
