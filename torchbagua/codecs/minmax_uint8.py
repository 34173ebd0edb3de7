"""MinMaxUInt8: 8 bits per element, quantized between the minimum and the maximum of its block."""

from dataclasses import dataclass
from typing import ClassVar

from torchbagua.codecs.base import register_compressor
from torchbagua.codecs.block_codec import NativeBlockCodec


@dataclass(frozen=True)
class MinMaxUInt8(NativeBlockCodec):
    """Quantizes float32, bfloat16 or float16 to 8 bits, with one range for each block (Bagua, arXiv 2107.01499).

    The error of a decoded value is at most half a step, (max - min) / 510, plus rounding. Zeros inside the range, and
    blocks of equal values, are exact. A block that contains a NaN, an Inf or a magnitude of 2^126 or more decodes to
    NaN.

    Args:
        block: the number of elements that share a range, a multiple of 8. None gives one range per chunk, as in Bagua;
            results then depend on the number of ranks and on how DDP forms its buckets.

    Raises:
        TypeError, ValueError: `block` is not a valid block size.
    """

    op_prefix: ClassVar[str] = "minmax_uint8"


register_compressor("minmax_uint8", MinMaxUInt8)
