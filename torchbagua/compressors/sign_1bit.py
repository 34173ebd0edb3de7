"""Sign1Bit: the sign of each element, and the mean magnitude of its block."""

from dataclasses import dataclass
from typing import ClassVar

from torchbagua.compressors.base import register_compressor
from torchbagua.compressors.block_codec import NativeBlockCodec


@dataclass(frozen=True)
class Sign1Bit(NativeBlockCodec):
    """Sign of float32, bfloat16 or float16 and one scale per block, for 1-bit Adam (Tang et al., arXiv 2102.02888).

    A decoded value is the mean magnitude of its block with the sign that it had; -0 counts as negative. The mean is
    biased and meant for error feedback. A block that holds a NaN or an Inf, or whose mean magnitude is 2^126 or more
    or whose magnitudes add up to Inf, decodes to NaN.

    Args:
        block: elements that share a scale, a multiple of 8. None gives one scale per chunk, whose results depend on
            the number of ranks and on how DDP makes its buckets.

    Raises:
        TypeError, ValueError: `block` is no such number.
    """

    op_prefix: ClassVar[str] = "sign_1bit"


register_compressor("sign1bit", Sign1Bit)
