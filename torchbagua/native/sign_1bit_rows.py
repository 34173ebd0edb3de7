"""Sign1Bit in plain torch, of K blocks of L elements each as the rows of a matrix; P payload bytes a block."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchbagua.native.schema import UNUSABLE_MAGNITUDE

_LANES = 32


def _is_usable(scale: Tensor) -> Tensor:
    bits = scale.view(torch.int32)
    return (bits >= 0) & (bits < UNUSABLE_MAGNITUDE)


def _sum_of_magnitudes(values_kl: Tensor) -> Tensor:
    """The sums [K, 1], added in the order of element/sign_1bit.h; the zeros of the padding change none."""
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


def encode_rows(values_kl: Tensor) -> tuple[Tensor, Tensor]:
    """Headers [K, 1] float32 and signs [K, P] uint8 of K blocks [K, L] float32."""
    num_blocks, length = values_kl.shape
    total = _sum_of_magnitudes(values_kl)
    scale_k1 = torch.div(total, torch.full_like(total, length))
    usable = _is_usable(scale_k1)
    bits = pad((values_kl.view(torch.int32) < 0).to(torch.uint8), (0, -length % 8)).view(num_blocks, -1, 8)
    signs_kp = (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(dim=2, dtype=torch.uint8)
    return torch.where(usable, scale_k1, torch.nan), torch.where(usable, signs_kp, 0)


def decode_rows(header_k1: Tensor, signs_kp: Tensor) -> Tensor:
    """The K blocks [K, 8 P] float32 of headers [K, 1] and signs [K, P]; what comes after L elements means nothing."""
    bits = signs_kp[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=signs_kp.device) & 1
    values = torch.where(bits.flatten(1) == 1, -header_k1, header_k1)
    return torch.where(_is_usable(header_k1), values, torch.nan)
