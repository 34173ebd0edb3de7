"""How a flat tensor is cut into blocks, blocks are dealt to chunks, and chunks are laid out as bytes.

Shape suffixes in this package: N elements, C chunks, B blocks, L elements of a chunk, W wire bytes, R ranks.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

ROW_ALIGNMENT_BYTES = 32


def pad_row(num_bytes: int) -> int:
    """Return the size of a row that holds `num_bytes`: a multiple of 32, so that every row of a wire is aligned."""
    return -(-num_bytes // ROW_ALIGNMENT_BYTES) * ROW_ALIGNMENT_BYTES


def block_bounds(segment_lengths: Sequence[int], block: int) -> torch.Tensor:
    """Cut segments that lie one after the other into blocks of `block` elements that never cross a segment's end.

    Returns:
        int64 [B + 1], ascending from 0: block b is the elements bounds[b] to bounds[b + 1].
    """
    starts = []
    offset = 0
    for length in segment_lengths:
        starts.append(torch.arange(offset, offset + length, block, dtype=torch.int64))
        offset += length
    return torch.cat([*starts, torch.tensor([offset], dtype=torch.int64)])


def deal_blocks(bounds_B: torch.Tensor, num_chunks: int) -> list[int]:
    """Deal whole blocks to chunks, in order, balanced by elements; a chunk may be empty.

    Returns:
        C + 1 block indices, from 0 to B: chunk c is the blocks result[c] to result[c + 1].
    """
    num_elements = int(bounds_B[-1])
    targets = torch.tensor([chunk * num_elements // num_chunks for chunk in range(num_chunks)], dtype=torch.int64)
    cuts: list[int] = torch.searchsorted(bounds_B, targets).tolist()
    return [*cuts, len(bounds_B) - 1]


@dataclass(frozen=True)
class WireLayout:
    """Where the C chunks of a flat tensor lie, in the tensor and in the wire of one compressor.

    Attributes:
        dtype: of the tensor.
        elements: of each chunk, its slice of the tensor.
        rows: of each chunk, its slice of the wire, in bytes.
        table: int64 [B, 4] for block-wise compressors, else [0, 4]: of each block its start and length in the tensor
            and the offsets of header and payload in the wire.
        chunk_blocks: C + 1 row indices into `table`.
    """

    dtype: torch.dtype
    elements: tuple[slice, ...]
    rows: tuple[slice, ...]
    table: torch.Tensor
    chunk_blocks: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole wire."""
        return max((row.stop for row in self.rows), default=0)

    def chunk(self, index: int) -> "WireLayout":
        """Return the layout of one chunk alone, in a tensor and a wire of its own."""
        elements, row = self.elements[index], self.rows[index]
        first, last = self.chunk_blocks[index], self.chunk_blocks[index + 1]
        shift = torch.tensor([elements.start, 0, row.start, row.start], device=self.table.device)
        return WireLayout(
            dtype=self.dtype,
            elements=(slice(0, elements.stop - elements.start),),
            rows=(slice(0, row.stop - row.start),),
            table=self.table[first:last] - shift,
            chunk_blocks=(0, last - first),
        )

    def beginning(self, num_elements: int) -> "WireLayout":
        """Return the layout of the first blocks of a layout of one chunk, about so many elements of it."""
        first = min(num_elements, self.elements[0].stop)
        num_blocks = 0
        if len(self.table):
            num_blocks = max(1, int((self.table[:, 0] + self.table[:, 1] <= first).sum()))
            first = int(self.table[num_blocks - 1, :2].sum())
        return replace(self, elements=(slice(0, first),), table=self.table[:num_blocks], chunk_blocks=(0, num_blocks))


def lay_out(
    bounds_B: torch.Tensor,
    chunk_blocks: Sequence[int],
    row_bytes: Callable[[int, int], int],
    dtype: torch.dtype,
    device: torch.device,
) -> WireLayout:
    """Lay chunks out in rows of `row_bytes(num_elements, num_blocks)`, one after the other, with an empty table."""
    cuts = bounds_B[list(chunk_blocks)].tolist()
    elements = tuple(slice(start, stop) for start, stop in itertools.pairwise(cuts))
    rows, offset = [], 0
    for chunk, (first, last) in zip(elements, itertools.pairwise(chunk_blocks), strict=True):
        size = row_bytes(chunk.stop - chunk.start, last - first)
        rows.append(slice(offset, offset + size))
        offset += size
    return WireLayout(
        dtype=dtype,
        elements=elements,
        rows=tuple(rows),
        table=torch.zeros(0, 4, dtype=torch.int64, device=device),
        chunk_blocks=(0,) * len(chunk_blocks),
    )
