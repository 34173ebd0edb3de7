"""Sign1Bit: the sign of each element, and the mean magnitude of its block."""

from dataclasses import dataclass
from typing import ClassVar

from torchbagua.codecs.base import register_compressor
from torchbagua.codecs.block_codec import NativeBlockCodec


@dataclass(frozen=True)
class Sign1Bit(NativeBlockCodec):
    """Sends the signs of float32, bfloat16 or float16, and one scale per block: for 1-bit Adam (arXiv 2102.02888).

    A decoded value has the sign of the element and the mean magnitude of its block; -0 counts as negative. The codec is
    biased, so use error feedback. A block decodes to NaN if it contains a NaN or an Inf, if its mean magnitude is 2^126
    or more, or if the sum of its magnitudes is Inf.

    Args:
        block: the number of elements that share a scale, a multiple of 8. None gives one scale per chunk; results then
            depend on the number of ranks and on how DDP forms its buckets.

    Raises:
        TypeError, ValueError: `block` is not a valid block size.
    """

    op_prefix: ClassVar[str] = "sign1bit"
    needs_feedback = True


register_compressor("sign1bit", Sign1Bit)
