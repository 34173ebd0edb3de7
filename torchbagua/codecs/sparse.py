"""The common part of the sparse codecs: their options, and the sizes of blocks that send only some elements."""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch

from torchbagua.codecs.base import DEFAULT_BLOCK
from torchbagua.codecs.block_codec import NativeBlockCodec
from torchbagua.native.sparse import LONGEST_BLOCK, SparseFormat


def check_ratio(owner: str, ratio: float) -> None:
    """Raise TypeError or ValueError unless `ratio` is a number in (0, 1]. The error names the class `owner`."""
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)):
        raise TypeError(f"{owner}: ratio must be a number, got {ratio!r}")
    if not 0 < ratio <= 1:
        raise ValueError(f"{owner}: ratio must be above 0 and at most 1, got {ratio}")


def check_sparse_block(owner: str, block: int) -> None:
    """Raise TypeError or ValueError unless `block` is a valid block size of a sparse codec."""
    if not isinstance(block, int) or isinstance(block, bool):
        raise TypeError(f"{owner}: block must be an int, got {block!r}")
    if not 8 <= block <= LONGEST_BLOCK or block % 8:
        raise ValueError(f"{owner}: block must be a multiple of 8 from 8 to {LONGEST_BLOCK}, got {block}")


class SparseBytes(NamedTuple):
    """The sizes of blocks that send only some elements.

    Attributes:
        format: the format of the codec.
        block: the number of elements in a full block.
        kept: the number of elements of a full block that are sent.
        header_bytes: the size of a block's header.
    """

    format: SparseFormat
    block: int
    kept: int
    header_bytes: int = SparseFormat.header_bytes

    def num_kept(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return the number of sent elements for blocks of `lengths`: the same fraction of each, rounded up."""
        return -(-lengths * self.kept // self.block)

    def payload_bytes(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return the payload sizes of blocks with `lengths` elements."""
        zeros = torch.zeros_like(lengths)
        table = torch.stack([zeros, lengths, zeros, zeros, self.num_kept(lengths)], dim=1)
        return self.format.payload_sizes(table)

    def most_bytes(self, num_elements: int, num_blocks: int) -> int:
        """Return the largest total size of the headers and payloads of `num_blocks` blocks with `num_elements` in all.

        See `BlockBytes.most_bytes`.
        """
        most_kept = (num_elements * self.kept + num_blocks * (self.block - 1)) // self.block
        most_kept = min(most_kept, num_elements, num_blocks * self.kept)
        most_index_bytes = self.format.most_index_bytes(self.block, self.kept, num_blocks, most_kept)
        return self.header_bytes * num_blocks + most_index_bytes + most_kept


@dataclass(frozen=True)
class SparseCodec(NativeBlockCodec):
    """A codec that sends some elements of each block, in 8 bits, and decodes the others to zero.

    A subclass selects the elements by its `format`, the codec in plain torch. Nearly the whole tensor goes into the
    residual, so the codec needs error feedback.

    Args:
        block: the number of elements in a block, a multiple of 8 from 8 to 4096.
        ratio: the fraction of a block that is sent, above 0 and at most 1. `ceil(ratio * block)` elements of a full
            block are sent, and the same fraction of a shorter block, rounded up.

    Raises:
        TypeError, ValueError: an argument is out of its range.
    """

    format: ClassVar[SparseFormat]
    needs_feedback = True

    block: int = DEFAULT_BLOCK
    ratio: float = 0.01

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_sparse_block(name, self.block)
        check_ratio(name, self.ratio)
        super().__post_init__()

    @cached_property
    def block_format(self) -> SparseBytes:
        # The decimal value of the ratio: 0.07 * 100 is 7 elements, not the 8 that the binary fraction rounds up to.
        return SparseBytes(self.format, self.block, math.ceil(Fraction(repr(float(self.ratio))) * self.block))

    def block_table(self, bounds_B: torch.Tensor, first_byte: int) -> torch.Tensor:
        table = super().block_table(bounds_B, first_byte)
        return torch.cat([table, self.block_format.num_kept(table[:, 1:2])], dim=1)
