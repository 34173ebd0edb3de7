"""A codec as a user would add it in torchbagua/native/first.py: it sends the first element of each block in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from torchbagua.native.block_format import BlockFormat, register_codec


class First(BlockFormat):
    """No header, and 4 bytes for a block of any length."""

    name = "first"
    header_bytes = 0

    def payload_bytes(self, lengths: Tensor) -> Tensor:
        return torch.full_like(lengths, 4)

    def most_bytes(self, num_elements: int, num_blocks: int) -> int:
        return 4 * num_blocks

    def encode_rows(self, values_kl: Tensor) -> tuple[Tensor, Tensor]:
        payloads_k4 = values_kl[:, :1].contiguous().view(torch.uint8)
        return payloads_k4[:, :0], payloads_k4

    def decode_rows(self, headers_kh: Tensor, payloads_kp: Tensor, length: int) -> Tensor:
        values_kl = torch.zeros(len(payloads_kp), length, device=payloads_kp.device)
        values_kl[:, :1] = payloads_kp.contiguous().view(torch.float32)
        return values_kl


register_codec(First())
