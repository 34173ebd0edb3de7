"""MinMaxUInt4: four bits an element between the smallest and the largest of its block."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from torchbagua.codecs.base import register_compressor
from torchbagua.codecs.block_codec import NativeBlockCodec
from torchbagua.codecs.blocks import pad_bytes


@dataclass(frozen=True)
class MinMaxUInt4(NativeBlockCodec):
    """Quantises float32, bfloat16 or float16 to 4 bits, with one range for each block: 4.25 bits an element.

    The formula is that of `MinMaxUInt8`, with 15 steps in place of 255. The range is kept in bfloat16, rounded outwards
    so that no element lies outside it. Two elements share a byte, the first of them in its lower half. A block with an
    odd number of elements, the last one of a parameter for instance, takes half a byte more, which is zero.

    A decoded value is off by at most half a step, which is (max - min) / 30 of the rounded range, and rounding. Zeros
    inside the range, and blocks of one bfloat16 value, are exact. A block decodes to NaN if it holds a NaN, an Inf or a
    magnitude above 2^126 - 2^118, the largest bfloat16 below 2^126.

    Args:
        block: how many elements share a range, a multiple of 8. None gives one range per chunk; results then depend on
            the number of ranks and on how DDP forms its buckets.

    Raises:
        TypeError, ValueError: `block` is not such a number.
    """

    op_prefix: ClassVar[str] = "minmax_uint4"

    block: int | None = 128

    def wire_bytes(self, num_elements: int, num_blocks: int, dtype: torch.dtype) -> int:
        """Return the bytes of one chunk. A block with an odd number of elements lacks at least one of the full number.

        So there are no more of them than elements are lacking, and half a byte for each of these is enough.
        """
        if self.block is None:
            return super().wire_bytes(num_elements, num_blocks, dtype)
        num_odd = min(num_blocks, num_blocks * self.block - num_elements)
        return pad_bytes(self.block_format.header_bytes * num_blocks + (num_elements + num_odd) // 2)


register_compressor("minmax_uint4", MinMaxUInt4)
