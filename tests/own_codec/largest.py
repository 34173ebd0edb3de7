"""A codec as a user would add it in torchbagua/native/largest.py: it sends the largest magnitude of each block.

A payload has 8 bytes for a block of any length: the index of the element, and its value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchbagua.native.block_format import BlockFormat, register_codec


class Largest(BlockFormat):
    """No header; an int32 and a float32 for each block."""

    name = "largest"
    header_bytes = 0

    def payload_bytes(self, lengths: Tensor) -> Tensor:
        return torch.full_like(lengths, 8)

    def most_bytes(self, num_elements: int, num_blocks: int) -> int:
        return 8 * num_blocks

    def encode_rows(self, values_kl: Tensor) -> tuple[Tensor, Tensor]:
        index_k1 = values_kl.abs().argmax(dim=1, keepdim=True)
        value_k1 = values_kl.gather(1, index_k1)
        payloads_k8 = torch.cat((index_k1.to(torch.int32).view(torch.uint8), value_k1.view(torch.uint8)), dim=1)
        return payloads_k8[:, :0], payloads_k8

    def decode_rows(self, headers_kh: Tensor, payloads_kp: Tensor, length: int) -> Tensor:
        index_k1 = payloads_kp[:, :4].contiguous().view(torch.int32).long()
        is_inside = (index_k1 >= 0) & (index_k1 < length)
        value_k1 = torch.where(is_inside, payloads_kp[:, 4:].contiguous().view(torch.float32), torch.nan)
        values_kl = torch.zeros(len(payloads_kp), length, device=payloads_kp.device)
        return values_kl.scatter(1, torch.where(is_inside, index_k1, 0), value_k1)


register_codec(Largest())
