"""MinMaxUInt4 in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchbagua.native.block_format import register_codec
from torchbagua.native.minmax import MinMaxFormat
from torchbagua.native.qadam import define_momenta_operations


class MinMaxUInt4Format(MinMaxFormat):
    """Minimum and maximum, bfloat16 each, in the header; half a byte for each element, the lower half first."""

    name = "minmax_uint4"
    header_bytes = 4
    num_steps = 15
    unusable_magnitude = 0x7E7F0001  # just above the largest bfloat16 below 2^126

    def payload_bytes(self, lengths: Tensor) -> Tensor:
        return lengths // 2 + lengths % 2

    def most_bytes(self, num_elements: int, num_blocks: int) -> int:
        return self.header_bytes * num_blocks + (num_elements + num_blocks) // 2

    def widened(self, range_k2: Tensor) -> Tensor:
        bits = range_k2.view(torch.int32)
        # Truncating the lower half of a float rounds toward zero; adding 0xffff first rounds away from zero instead.
        grows = torch.stack((bits[:, 0] < 0, bits[:, 1] >= 0), dim=1)
        return ((bits + 0xFFFF * grows.to(torch.int32)) & -0x10000).view(torch.float32) + 0.0  # -0 becomes +0

    def pack_range(self, range_k2: Tensor) -> Tensor:
        # The upper half of each float, as `to(torch.bfloat16)` would give except for the bits of NaN.
        return (range_k2.view(torch.int32) >> 16).to(torch.int16).view(torch.uint8)

    def unpack_range(self, headers_kh: Tensor) -> Tensor:
        return headers_kh.view(torch.bfloat16).to(torch.float32)

    def pack_codes(self, codes_kl: Tensor) -> Tensor:
        pairs = pad(codes_kl, (0, codes_kl.shape[1] % 2))
        return pairs[:, ::2] | pairs[:, 1::2] << 4

    def unpack_codes(self, payloads_kp: Tensor, length: int) -> Tensor:
        return torch.stack((payloads_kp & 15, payloads_kp >> 4), dim=2).flatten(1)[:, :length]


register_codec(MinMaxUInt4Format())
define_momenta_operations(MinMaxUInt4Format())
