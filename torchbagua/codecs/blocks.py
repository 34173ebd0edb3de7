"""What is communicated, how it is cut into blocks and chunks, and where the chunks lie in the bytes that are sent.

A *segment* is one parameter's elements in a flat tensor. A *block* is a piece of a segment that a codec codes as a
whole. A *chunk* is several blocks, which one rank owns; a *shard* is a chunk within a node. A codec with `block=None`
codes a whole chunk as one, and blocks only say where chunks may begin.

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
    """The description of a flat tensor that is communicated, without its values.

    Attributes:
        segment_lengths: how many elements each parameter has that lies in the tensor, one after the other. No block
            crosses from one parameter to the next.
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
        """How many elements the tensor has."""
        return sum(self.segment_lengths)

    def block_bounds(self, block_elements: int) -> torch.Tensor:
        """Cut every segment into blocks of `block_elements`. The last block of a segment may be shorter.

        Returns:
            An int64 tensor of B + 1 ascending numbers from 0, for B blocks: block b is the elements from number b to
                number b + 1.
        """
        starts = []
        offset = 0
        for length in self.segment_lengths:
            starts.append(torch.arange(offset, offset + length, block_elements, dtype=torch.int64))
            offset += length
        return torch.cat([*starts, torch.tensor([offset], dtype=torch.int64)])

    def even_cuts(self, num_chunks: int, block_elements: int) -> tuple[int, ...]:
        """Assign whole blocks to chunks in their order, with about as many elements in each. A chunk may be empty.

        Returns:
            C + 1 numbers from 0 to the number of elements, for C chunks: chunk c is the elements from number c to
                number c + 1.
        """
        bounds_B = self.block_bounds(block_elements)
        targets = torch.tensor([chunk * self.num_elements // num_chunks for chunk in range(num_chunks)])
        cuts: list[int] = bounds_B[torch.searchsorted(bounds_B, targets)].tolist()
        return (*cuts, self.num_elements)

    def cuts_within(self, cuts: Sequence[int], num_pieces: int, block_elements: int) -> tuple[int, ...]:
        """Cut each chunk into pieces of whole blocks, with about as many elements in each. A piece may be empty.

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
        """Return the description of a tensor of `dtype` that consists of some of the elements."""
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
    """Where the chunks of a flat tensor lie, in the tensor and in the wire of a codec.

    Attributes:
        dtype: the dtype of the tensor.
        elements: for each chunk, its slice of the tensor.
        byte_slices: for each chunk, its slice of the wire.
        table: an int64 tensor with a row for each block: its start and length in the tensor, and the offsets of header
            and payload in the wire; of a sparse codec also how many elements are kept. Without rows for a codec that
            has no blocks.
        chunk_blocks: C + 1 indices of rows in `table`, for C chunks: those of chunk c begin at number c.
    """

    dtype: torch.dtype
    elements: tuple[slice, ...]
    byte_slices: tuple[slice, ...]
    table: torch.Tensor
    chunk_blocks: tuple[int, ...]

    @cached_property
    def num_bytes(self) -> int:
        """How many bytes the whole wire has."""
        return max((one.stop for one in self.byte_slices), default=0)

    def chunk(self, index: int) -> "WireLayout":
        """Return the layout of one chunk, as a tensor and a wire of its own."""
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
        """Return the layout of the first blocks, with about `num_elements` elements. Only for a layout of one chunk."""
        first = min(num_elements, self.elements[0].stop)
        num_blocks = 0
        if len(self.table):
            num_blocks = max(1, int((self.table[:, 0] + self.table[:, 1] <= first).sum()))
            first = int(self.table[num_blocks - 1, :2].sum())
        return replace(self, elements=(slice(0, first),), table=self.table[:num_blocks], chunk_blocks=(0, num_blocks))


def blocks_of_chunks(bounds_B: torch.Tensor, cuts: Sequence[int], name: str, *, are_whole: bool) -> list[int]:
    """Return the C + 1 indices of blocks at which the chunks of the tensor `name` begin and end.

    Raises:
        ValueError: `cuts` do not ascend from 0 to the tensor's length, or one lies within a block and blocks must be
            whole.
    """
    wanted = torch.tensor(list(cuts), dtype=torch.int64)
    num_elements = int(bounds_B[-1])
    if len(wanted) < 2 or wanted[0] != 0 or wanted[-1] != num_elements or (wanted.diff() < 0).any():
        raise ValueError(f"the cuts of {name} must ascend from 0 to its {num_elements} elements, got {list(cuts)}")
    chunk_blocks = torch.searchsorted(bounds_B, wanted)
    within = wanted[bounds_B[chunk_blocks] != wanted].tolist()
    if within and are_whole:
        raise ValueError(f"the cuts of {name} must lie between its blocks, got {within[0]}, which is within one")
    indices: list[int] = chunk_blocks.tolist()
    return indices
