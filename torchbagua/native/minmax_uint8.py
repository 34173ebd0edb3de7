"""MinMaxUInt8 in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from torchbagua.native.block_format import register_codec
from torchbagua.native.minmax import MinMaxFormat
from torchbagua.native.qadam import define_momenta_operations


class MinMaxUInt8Format(MinMaxFormat):
    """Minimum and maximum, float32 each, in the header; a byte for each element."""

    name = "minmax_uint8"
    header_bytes = 8
    num_steps = 255

    def payload_bytes(self, lengths: Tensor) -> Tensor:
        return lengths

    def most_bytes(self, num_elements: int, num_blocks: int) -> int:
        return self.header_bytes * num_blocks + num_elements

    def widened(self, range_k2: Tensor) -> Tensor:
        return range_k2

    def pack_range(self, range_k2: Tensor) -> Tensor:
        return range_k2.view(torch.uint8)

    def unpack_range(self, headers_kh: Tensor) -> Tensor:
        return headers_kh.view(torch.float32)

    def pack_codes(self, codes_kl: Tensor) -> Tensor:
        return codes_kl

    def unpack_codes(self, payloads_kp: Tensor, length: int) -> Tensor:
        return payloads_kp


register_codec(MinMaxUInt8Format())
define_momenta_operations(MinMaxUInt8Format())
