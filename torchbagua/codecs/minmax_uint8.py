"""MinMaxUInt8: eight bits an element between the smallest and the largest of its block."""

from dataclasses import dataclass
from typing import ClassVar

from torchbagua.codecs.base import register_compressor
from torchbagua.codecs.block_codec import NativeBlockCodec


@dataclass(frozen=True)
class MinMaxUInt8(NativeBlockCodec):
    """Quantises float32, bfloat16 or float16 to 8 bits, with one range for each block (Bagua, arXiv 2107.01499).

    A decoded value is off by at most half a step, which is (max - min) / 510, and rounding. Zeros inside the range, and
    blocks of equal values, are exact. A block that holds a NaN, an Inf or a magnitude of 2^126 or more decodes to NaN.

    Args:
        block: how many elements share a range, a multiple of 8. None gives Bagua's one range per chunk; results then
            depend on the number of ranks and on how DDP forms its buckets.

    Raises:
        TypeError, ValueError: `block` is not such a number.
    """

    op_prefix: ClassVar[str] = "minmax_uint8"


register_compressor("minmax_uint8", MinMaxUInt8)
