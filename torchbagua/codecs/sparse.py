"""What sparse codecs share: their options, and how many bytes blocks take of which some elements are kept."""

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
    """Raise TypeError or ValueError unless `ratio` is a number in (0, 1]. `owner` is the class that the error names."""
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)):
        raise TypeError(f"{owner}: ratio must be a number, got {ratio!r}")
    if not 0 < ratio <= 1:
        raise ValueError(f"{owner}: ratio must be above 0 and at most 1, got {ratio}")


def check_sparse_block(owner: str, block: int) -> None:
    """Raise TypeError or ValueError unless `block` is a block size of a sparse codec."""
    if not isinstance(block, int) or isinstance(block, bool):
        raise TypeError(f"{owner}: block must be an int, got {block!r}")
    if not 8 <= block <= LONGEST_BLOCK or block % 8:
        raise ValueError(f"{owner}: block must be a multiple of 8 from 8 to {LONGEST_BLOCK}, got {block}")


class SparseBytes(NamedTuple):
    """The bytes of blocks of which some elements are kept.

    Attributes:
        format: the codec's.
        block: the elements of a block that is not shorter.
        kept: how many of these are kept.
        header_bytes: what a block's header takes.
    """

    format: SparseFormat
    block: int
    kept: int
    header_bytes: int = SparseFormat.header_bytes

    def num_kept(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return how many elements of blocks of `lengths` are kept: the same share of each, rounded up."""
        return -(-lengths * self.kept // self.block)

    def payload_bytes(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return what the payloads of blocks of `lengths` elements take."""
        nothing = torch.zeros_like(lengths)
        table = torch.stack([nothing, lengths, nothing, nothing, self.num_kept(lengths)], dim=1)
        return self.format.payload_sizes(table)

    def most_bytes(self, num_elements: int, num_blocks: int) -> int:
        """Return the most that headers and payloads of so many blocks, with so many elements in all, can take."""
        most_kept = (num_elements * self.kept + num_blocks * (self.block - 1)) // self.block
        most_kept = min(most_kept, num_elements, num_blocks * self.kept)
        most_index_bytes = self.format.most_index_bytes(self.block, self.kept, num_blocks, most_kept)
        return self.header_bytes * num_blocks + most_index_bytes + most_kept


@dataclass(frozen=True)
class SparseCodec(NativeBlockCodec):
    """A codec of which some elements of each block travel, in 8 bits, and the others decode to zero.

    A subclass says which, by `format`, the codec in plain torch. Since nearly everything is left out, it is used with
    error feedback.

    Args:
        block: how many elements a block has, a multiple of 8 from 8 to 4096.
        ratio: the share of a block that is kept, above 0 and at most 1. `ceil(ratio * block)` elements of a whole block
            are kept, and the same share of a shorter one, rounded up.

    Raises:
        TypeError, ValueError: an argument is not such a number.
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
        # The ratio as it is written: 0.07 of 100 are 7, and not the 8 that binary fractions make of it.
        return SparseBytes(self.format, self.block, math.ceil(Fraction(repr(float(self.ratio))) * self.block))

    def block_table(self, bounds_B: torch.Tensor, first_byte: int) -> torch.Tensor:
        table = super().block_table(bounds_B, first_byte)
        return torch.cat([table, self.block_format.num_kept(table[:, 1:2])], dim=1)
