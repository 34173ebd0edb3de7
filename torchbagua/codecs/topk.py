"""TopK: the elements of each block with the largest magnitudes, 8 bits and an index each."""

from dataclasses import dataclass

from torchbagua.codecs.base import register_compressor
from torchbagua.codecs.sparse import SparseCodec
from torchbagua.native.topk import TopKFormat


@dataclass(frozen=True)
class TopK(SparseCodec):
    """Sends the elements of each block with the largest magnitudes: an index and 8 bits each, and a scale per block.

    All other elements decode to zero. With `ratio=0.01`, a block of 2048 elements sends 21 elements in 54 bytes: 0.21
    bits per element. Nearly the whole block goes into the residual, so use error feedback.

    Among equal magnitudes, the first elements are sent. The error of a sent value is at most half a step, which is the
    largest magnitude of the block divided by 254. A block that contains a NaN, an Inf or a magnitude of 2^126 or more
    decodes to NaN. A block with indices that do not ascend or are out of range also decodes to NaN; no encoder writes
    such a block.

    Args:
        block: the number of elements in a block, a multiple of 8 from 8 to 4096.
        ratio: the fraction of a block that is sent, above 0 and at most 1. `ceil(ratio * block)` elements of a full
            block are sent, and the same fraction of a shorter block, rounded up.

    Raises:
        TypeError, ValueError: an argument is out of its range.
    """

    op_prefix = "topk"
    format = TopKFormat()


register_compressor("topk", TopK)
