"""BlockK: the largest run of neighbours in each block, in eight bits each and one number."""

from dataclasses import dataclass

from torchbagua.codecs.base import register_compressor
from torchbagua.codecs.sparse import SparseCodec
from torchbagua.native.blockk import BlockKFormat


@dataclass(frozen=True)
class BlockK(SparseCodec):
    """The run of neighbours in each block with the largest sum of squares: 8 bits for each, a scale, and its place.

    All other elements decode to zero. Of a block of 2048, a run of 21 elements is kept at `ratio=0.01`, in 27 bytes:
    0.11 bits an element, half of what `TopK` takes. Since this leaves nearly everything out, use it with error
    feedback.

    A block is cut into runs of as many elements as are kept. The last one ends with the block, and may overlap the one
    before it. Of equal sums the first run is kept. A kept value is off by at most half a step, which is the largest
    magnitude of the run divided by 254. A block that holds a NaN, an Inf or a magnitude of 2^126 or more decodes to
    NaN, wherever that is in it. So does one with the number of a run that there is not.

    Args:
        block: how many elements a block has, a multiple of 8 from 8 to 4096.
        ratio: the share of a block that is kept, above 0 and at most 1. `ceil(ratio * block)` elements of a whole block
            are kept, and the same share of a shorter one, rounded up.

    Raises:
        TypeError, ValueError: an argument is not such a number.
    """

    op_prefix = "blockk"
    format = BlockKFormat()


register_compressor("blockk", BlockK)
