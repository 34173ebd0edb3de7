"""Sign1Bit in plain torch; docs/arithmetic.md has the formulas."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchbagua.native.block_format import BlockFormat, is_usable, register_codec
from torchbagua.native.qadam import define_momenta_operations

_LANES = 32


def _sum_of_magnitudes(values_kl: Tensor) -> Tensor:
    """Return the sums [K, 1], in the order of docs/arithmetic.md; the zeros of the padding do not change them."""
    num_blocks, length = values_kl.shape
    steps = pad(values_kl.abs(), (0, -length % _LANES)).view(num_blocks, -1, _LANES).unbind(1)
    lanes = steps[0]
    for step in steps[1:]:
        lanes = lanes + step
    width = _LANES // 2
    while width:
        lanes = lanes[:, :width] + lanes[:, width:]
        width //= 2
    return lanes


class Sign1BitFormat(BlockFormat):
    """The mean magnitude, float32, in the header; one bit per element, set if the element is negative."""

    name = "sign1bit"
    header_bytes = 4

    def payload_bytes(self, lengths: Tensor) -> Tensor:
        return -(-lengths // 8)

    def most_bytes(self, num_elements: int, num_blocks: int) -> int:
        return self.header_bytes * num_blocks + (num_elements + 7 * num_blocks) // 8

    def encode_rows(self, values_kl: Tensor) -> tuple[Tensor, Tensor]:
        num_blocks, length = values_kl.shape
        total = _sum_of_magnitudes(values_kl)
        scale_k1 = torch.div(total, torch.full_like(total, length))
        usable = is_usable(scale_k1)
        bits = pad((values_kl.view(torch.int32) < 0).to(torch.uint8), (0, -length % 8)).view(num_blocks, -1, 8)
        signs_kp = (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(dim=2, dtype=torch.uint8)
        return torch.where(usable, scale_k1, torch.nan).view(torch.uint8), torch.where(usable, signs_kp, 0)

    def decode_rows(self, headers_kh: Tensor, payloads_kp: Tensor, length: int) -> Tensor:
        scale_k1 = headers_kh.view(torch.float32)
        bits = payloads_kp[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=payloads_kp.device) & 1
        values = torch.where(bits.flatten(1)[:, :length] == 1, -scale_k1, scale_k1)
        return torch.where(is_usable(scale_k1), values, torch.nan)


register_codec(Sign1BitFormat())
define_momenta_operations(Sign1BitFormat())
