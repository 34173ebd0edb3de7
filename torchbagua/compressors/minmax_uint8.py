"""MinMaxUInt8: eight bits an element between the smallest and the largest of its block."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from torchbagua import native
from torchbagua.compressors.blocks import WireLayout, lay_out, pad_row

DEFAULT_BLOCK = 2048
_HEADER_BYTES = 8  # minimum and maximum, float32


def check_block(owner: str, block: int | None) -> None:
    """Raise TypeError or ValueError where `block` is not a block size; `owner` is the class that the error names."""
    if block is None:
        return
    if not isinstance(block, int) or isinstance(block, bool):
        raise TypeError(f"{owner}: block must be an int or None, got {block!r}")
    if block < 8 or block % 8:
        raise ValueError(f"{owner}: block must be None or a multiple of 8 that is at least 8, got {block}")


@dataclass(frozen=True)
class MinMaxUInt8:
    """8-bit quantisation of float32, bfloat16 or float16 with one range per block (Bagua, arXiv 2107.01499).

    A decoded value is off by at most half a step, (max - min) / 510, and rounding; zeros inside the range and constant
    blocks are exact. A block that holds a NaN, an Inf or a magnitude of 2^126 or more decodes to NaN.

    Args:
        block: elements that share a range, a multiple of 8. None gives Bagua's one range per chunk, whose results
            depend on the number of ranks and on how DDP makes its buckets.

    Raises:
        TypeError, ValueError: `block` is no such number.
    """

    block: int | None = DEFAULT_BLOCK

    def __post_init__(self) -> None:
        check_block("MinMaxUInt8", self.block)
        native.load()

    @property
    def granularity(self) -> int:
        """Elements of the blocks that chunks are made of."""
        return self.block or DEFAULT_BLOCK

    @property
    def in_place(self) -> bool:
        """False: the wire is smaller than the tensor."""
        return False

    def wire_bytes(self, num_elements: int, num_blocks: int, dtype: torch.dtype) -> int:
        """Return the bytes of one chunk: a header a range, then a byte an element."""
        num_ranges = num_blocks if self.block else min(num_blocks, 1)
        return pad_row(num_ranges * _HEADER_BYTES + num_elements)

    def layout(
        self, bounds_B: torch.Tensor, chunk_blocks: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> WireLayout:
        """Lay out chunks: in each row the headers, then the codes."""
        plain = lay_out(
            bounds_B, chunk_blocks, lambda length, blocks: self.wire_bytes(length, blocks, dtype), dtype, device
        )
        tables, range_cuts = [], [0]
        for elements, row, (first, last) in zip(
            plain.elements, plain.rows, itertools.pairwise(chunk_blocks), strict=True
        ):
            bounds = bounds_B[first : last + 1] if self.block else bounds_B[[first, last]].unique()
            starts, lengths = bounds[:-1], bounds.diff()
            codes = row.start + len(starts) * _HEADER_BYTES
            headers = row.start + _HEADER_BYTES * torch.arange(len(starts))
            tables.append(torch.stack([starts, lengths, headers, codes + starts - elements.start], dim=1))
            range_cuts.append(range_cuts[-1] + len(starts))
        return replace(plain, table=torch.cat(tables).to(device), chunk_blocks=tuple(range_cuts))

    def encode(self, x_N: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor) -> None:
        """Read `x_N`, write headers and codes of all chunks into `wire_W`."""
        torch.ops.torchbagua.minmax_uint8_encode(x_N, layout.table, wire_W)

    def decode(self, wire_W: torch.Tensor, layout: WireLayout, x_N: torch.Tensor) -> None:
        """Read `wire_W`, write `x_N`, computed in float32 and rounded to its dtype."""
        torch.ops.torchbagua.minmax_uint8_decode(wire_W, layout.table, x_N)

    def decode_mean_encode(
        self, rows_RW: torch.Tensor, layout: WireLayout, divisor: float, wire_W: torch.Tensor
    ) -> None:
        """Decode R wires of one chunk, add in float32 in row order, divide by `divisor`, encode into `wire_W`."""
        torch.ops.torchbagua.minmax_uint8_decode_mean_encode(rows_RW, layout.table, divisor, wire_W)
