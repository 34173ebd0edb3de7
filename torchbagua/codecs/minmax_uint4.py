"""MinMaxUInt4: 4 bits per element, quantized between the minimum and the maximum of its block."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from torchbagua.codecs.base import pad_bytes, register_compressor
from torchbagua.codecs.block_codec import NativeBlockCodec


@dataclass(frozen=True)
class MinMaxUInt4(NativeBlockCodec):
    """Quantizes float32, bfloat16 or float16 to 4 bits, with one range for each block: 4.25 bits per element.

    The formula is the same as in `MinMaxUInt8`, with 15 steps instead of 255. The range is stored in bfloat16, rounded
    outwards so that no element lies outside it. Two elements share a byte, the first of them in the lower half. A block
    with an odd number of elements, for example the last block of a parameter, ends with half a byte of zero.

    The error of a decoded value is at most half a step, (max - min) / 30 of the rounded range, plus rounding. Zeros
    inside the range, and blocks of a single bfloat16 value, are exact. A block decodes to NaN if it contains a NaN, an
    Inf or a magnitude above 2^126 - 2^118, the largest bfloat16 below 2^126.

    Args:
        block: the number of elements that share a range, a multiple of 8. None gives one range per chunk; results then
            depend on the number of ranks and on how DDP forms its buckets.

    Raises:
        TypeError, ValueError: `block` is not a valid block size.
    """

    op_prefix: ClassVar[str] = "minmax_uint4"

    block: int | None = 128

    def wire_bytes(self, num_elements: int, num_blocks: int, dtype: torch.dtype) -> int:
        """Return the size of one chunk in bytes.

        A block with an odd number of elements is at least one element shorter than a full block. The number of such
        blocks is therefore at most the number of missing elements, and half a byte for each of these is enough.
        """
        if self.block is None:
            return super().wire_bytes(num_elements, num_blocks, dtype)
        num_odd = min(num_blocks, num_blocks * self.block - num_elements)
        return pad_bytes(self.block_format.header_bytes * num_blocks + (num_elements + num_odd) // 2)


register_compressor("minmax_uint4", MinMaxUInt4)
