"""BlockK: the run of adjacent elements with the largest sum of squares in each block, 8 bits each, and its index."""

from dataclasses import dataclass

from torchbagua.codecs.base import register_compressor
from torchbagua.codecs.sparse import SparseCodec
from torchbagua.native.blockk import BlockKFormat


@dataclass(frozen=True)
class BlockK(SparseCodec):
    """Sends the run of adjacent elements with the largest sum of squares in each block: 8 bits each, a scale, an index.

    All other elements decode to zero. With `ratio=0.01`, a block of 2048 elements sends a run of 21 elements in 27
    bytes: 0.11 bits per element, half the size of `TopK`. Nearly the whole block goes into the residual, so use error
    feedback.

    Each block is cut into runs of as many elements as are sent. The last run ends with the block, and may overlap the
    run before it. If several runs have the same sum, the first of them is sent. The error of a sent value is at most
    half a step, which is the largest magnitude of the run divided by 254. A block decodes to NaN if any of its
    elements, inside or outside the run, is NaN, Inf or has a magnitude of 2^126 or more. A block also decodes to NaN
    if its run index is out of range.

    Args:
        block: the number of elements in a block, a multiple of 8 from 8 to 4096.
        ratio: the fraction of a block that is sent, above 0 and at most 1. `ceil(ratio * block)` elements of a full
            block are sent, and the same fraction of a shorter block, rounded up.

    Raises:
        TypeError, ValueError: an argument is out of its range.
    """

    op_prefix = "blockk"
    format = BlockKFormat()


register_compressor("blockk", BlockK)
