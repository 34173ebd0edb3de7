"""The description of a flat tensor, its partition into blocks and chunks, and the positions of chunks on the wire.

A *segment* is one parameter's elements in a flat tensor. A *block* is a part of a segment that a codec encodes as a
whole. A *chunk* is a sequence of blocks that one rank owns. A *shard* is a chunk within a node. A codec with
`block=None` encodes a whole chunk as one, and block boundaries then only determine where chunks may begin.

Shape suffixes in this package: N elements, C chunks, B blocks, L elements of a chunk, W wire bytes, R ranks.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

ALIGNMENT_BYTES = 32


def pad_bytes(num_bytes: int) -> int:
    """Return the next multiple of 32, so that every chunk of a wire is aligned."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class TensorSpec:
    """The description of a flat tensor to communicate, without its values.

    Attributes:
        segment_lengths: the number of elements of each parameter in the tensor, in order. No block crosses a parameter
            boundary.
        dtype: the dtype of the tensor.
        device: the device of the tensor.
        name: its name in events and errors.
    """

    segment_lengths: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    name: str

    @property
    def num_elements(self) -> int:
        """The number of elements in the tensor."""
        return sum(self.segment_lengths)

    def block_bounds(self, block_elements: int) -> torch.Tensor:
        """Cut every segment into blocks of `block_elements`. The last block of a segment may be shorter.

        Returns:
            For B blocks, an int64 tensor of B + 1 ascending offsets, the first 0: block b extends from offset b to
                offset b + 1.
        """
        starts = []
        offset = 0
        for length in self.segment_lengths:
            starts.append(torch.arange(offset, offset + length, block_elements, dtype=torch.int64))
            offset += length
        return torch.cat([*starts, torch.tensor([offset], dtype=torch.int64)])

    def even_cuts(self, num_chunks: int, block_elements: int) -> tuple[int, ...]:
        """Assign whole blocks, in order, to chunks of about equal numbers of elements. A chunk may be empty.

        Returns:
            For C chunks, C + 1 offsets from 0 to the number of elements: chunk c extends from offset c to offset c + 1.
        """
        bounds_B = self.block_bounds(block_elements)
        targets = torch.tensor([chunk * self.num_elements // num_chunks for chunk in range(num_chunks)])
        cuts: list[int] = bounds_B[torch.searchsorted(bounds_B, targets)].tolist()
        return (*cuts, self.num_elements)

    def cuts_within(self, cuts: Sequence[int], num_pieces: int, block_elements: int) -> tuple[int, ...]:
        """Cut each chunk into pieces of whole blocks, with about equal numbers of elements. A piece may be empty.

        Returns:
            The cuts of the pieces of the first chunk, of the second, and so on.
        """
        bounds_B = self.block_bounds(block_elements)
        pieces = []
        for start, stop in itertools.pairwise(cuts):
            targets = torch.tensor([start + piece * (stop - start) // num_pieces for piece in range(1, num_pieces)])
            pieces += [start, *bounds_B[torch.searchsorted(bounds_B, targets)].clamp(max=stop).tolist()]
        return (*pieces, self.num_elements)

    def restricted_to(self, elements: slice, dtype: torch.dtype) -> "TensorSpec":
        """Return the description of a tensor of `dtype` that consists of the given slice of elements."""
        lengths = []
        start = 0
        for length in self.segment_lengths:
            first, last = max(start, elements.start), min(start + length, elements.stop)
            if first < last:
                lengths.append(last - first)
            start += length
        return replace(self, segment_lengths=tuple(lengths), dtype=dtype)


@dataclass(frozen=True)
class WireLayout:
    """The positions of the chunks of a flat tensor, in the tensor and on the wire of a codec.

    Attributes:
        dtype: the dtype of the tensor.
        elements: for each chunk, its slice of the tensor.
        byte_slices: for each chunk, its slice of the wire.
        table: an int64 tensor with a row for each block: its start and length in the tensor, and the offsets of its
            header and payload on the wire. A sparse codec adds the number of elements that are sent. The table of a
            codec without blocks has no rows.
        chunk_blocks: for C chunks, C + 1 row indices of `table`: the rows of chunk c begin at entry c.
    """

    dtype: torch.dtype
    elements: tuple[slice, ...]
    byte_slices: tuple[slice, ...]
    table: torch.Tensor
    chunk_blocks: tuple[int, ...]

    @cached_property
    def num_bytes(self) -> int:
        """The size of the whole wire in bytes."""
        return max((byte_slice.stop for byte_slice in self.byte_slices), default=0)

    def chunk(self, index: int) -> "WireLayout":
        """Return the layout of one chunk, as a separate tensor and wire."""
        elements, own_bytes = self.elements[index], self.byte_slices[index]
        first, last = self.chunk_blocks[index], self.chunk_blocks[index + 1]
        shift = self.table.new_zeros(self.table.shape[1])
        shift[:4] = torch.tensor([elements.start, 0, own_bytes.start, own_bytes.start])
        return WireLayout(
            dtype=self.dtype,
            elements=(slice(0, elements.stop - elements.start),),
            byte_slices=(slice(0, own_bytes.stop - own_bytes.start),),
            table=self.table[first:last] - shift,
            chunk_blocks=(0, last - first),
        )

    def beginning(self, num_elements: int) -> "WireLayout":
        """Return the layout of the first blocks, about `num_elements` elements. For layouts of a single chunk only."""
        first = min(num_elements, self.elements[0].stop)
        num_blocks = 0
        if len(self.table):
            num_blocks = max(1, int((self.table[:, 0] + self.table[:, 1] <= first).sum()))
            first = int(self.table[num_blocks - 1, :2].sum())
        return replace(self, elements=(slice(0, first),), table=self.table[:num_blocks], chunk_blocks=(0, num_blocks))


def blocks_of_chunks(bounds_B: torch.Tensor, cuts: Sequence[int], name: str, *, are_whole: bool) -> list[int]:
    """Return the C + 1 block indices at which the C chunks of the tensor `name` begin and end.

    Raises:
        ValueError: `cuts` do not ascend from 0 to the tensor's length, or a cut lies within a block and blocks must be
            whole.
    """
    wanted = torch.tensor(list(cuts), dtype=torch.int64)
    num_elements = int(bounds_B[-1])
    if len(wanted) < 2 or wanted[0] != 0 or wanted[-1] != num_elements or (wanted.diff() < 0).any():
        raise ValueError(f"the cuts of {name} must ascend from 0 to its {num_elements} elements, got {list(cuts)}")
    chunk_blocks = torch.searchsorted(bounds_B, wanted)
    within = wanted[bounds_B[chunk_blocks] != wanted].tolist()
    if within and are_whole:
        raise ValueError(f"the cuts of {name} must lie between its blocks, got {within[0]}, which is within a block")
    indices: list[int] = chunk_blocks.tolist()
    return indices
