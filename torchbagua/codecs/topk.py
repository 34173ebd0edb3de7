"""TopK: the largest elements of each block, in eight bits and an index each."""

from dataclasses import dataclass

from torchbagua.codecs.base import register_compressor
from torchbagua.codecs.sparse import SparseCodec
from torchbagua.native.topk import TopKFormat


@dataclass(frozen=True)
class TopK(SparseCodec):
    """The elements of each block with the largest magnitudes: an index and 8 bits for each, and a scale for the block.

    All other elements decode to zero. Of a block of 2048, 21 elements are kept at `ratio=0.01`, in 54 bytes: 0.21 bits
    an element. Since this leaves nearly everything out, use it with error feedback.

    Of equal magnitudes those that come first are kept. A kept value is off by at most half a step, which is the largest
    magnitude of the block divided by 254. A block that holds a NaN, an Inf or a magnitude of 2^126 or more decodes to
    NaN. So does one whose indices do not ascend within it, which no encoder writes.

    Args:
        block: how many elements a block has, a multiple of 8 from 8 to 4096.
        ratio: the share of a block that is kept, above 0 and at most 1. `ceil(ratio * block)` elements of a whole block
            are kept, and the same share of a shorter one, rounded up.

    Raises:
        TypeError, ValueError: an argument is not such a number.
    """

    op_prefix = "topk"
    format = TopKFormat()


register_compressor("topk", TopK)
