"""MinMaxUInt8 in plain torch; docs/arithmetic.md has the formulas.

Every line is one float32 operation, because eager torch computes `255.0 / t`, `lerp`, `addcmul` and `alpha=` otherwise
than they read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchbagua.native.block_format import UNUSABLE_MAGNITUDE, BlockFormat, register_codec

_NARROWEST_RANGE = 2.0**-118
_ROUNDING_SHIFT = 12582912.0  # 1.5 * 2^23


class _Coder(NamedTuple):
    """A header unpacked for coding, [K, 1] each."""

    min: Tensor
    max: Tensor
    pivot: Tensor
    inverse: Tensor
    step: Tensor
    lowest: Tensor
    highest: Tensor
    usable: Tensor


def _magnitude(values: Tensor) -> Tensor:
    return values.view(torch.int32) & 0x7FFFFFFF


def _round_half_even(values: Tensor) -> Tensor:
    return (values + _ROUNDING_SHIFT) - _ROUNDING_SHIFT


def _clamp(values: Tensor, low: Tensor, high: Tensor) -> Tensor:
    raised = torch.where(low > values, low, values)
    return torch.where(high < raised, high, raised)


def _make_coder(header_k2: Tensor) -> _Coder:
    low, high = header_k2[:, :1], header_k2[:, 1:]
    usable = (_magnitude(header_k2) < UNUSABLE_MAGNITUDE).all(dim=1, keepdim=True) & (low <= high)
    zero = torch.zeros_like(low)
    pivot = torch.where(low > 0, low, torch.where(high < 0, high, zero))
    span = high - low
    steps = torch.full_like(span, 255.0)
    narrow = span < _NARROWEST_RANGE
    inverse = torch.where(narrow, zero, torch.div(steps, span))
    step = torch.where(narrow, zero, torch.div(span, steps))
    highest = _round_half_even((high - pivot) * inverse)
    return _Coder(low, high, pivot, inverse, step, highest - steps, highest, usable)


class MinMaxUInt8Format(BlockFormat):
    """Minimum and maximum, float32 each, in the header; a byte for each element."""

    name = "minmax_uint8"
    header_bytes = 8

    def payload_bytes(self, lengths: Tensor) -> Tensor:
        return lengths

    def most_bytes(self, num_elements: int, num_blocks: int) -> int:
        return self.header_bytes * num_blocks + num_elements

    def encode_rows(self, values_kl: Tensor) -> tuple[Tensor, Tensor]:
        usable = (_magnitude(values_kl) < UNUSABLE_MAGNITUDE).all(dim=1, keepdim=True)
        values_kl = torch.where(usable, values_kl, 0.0)
        header_k2 = torch.stack((values_kl.amin(dim=1), values_kl.amax(dim=1)), dim=1) + 0.0  # -0 becomes +0
        coder = _make_coder(header_k2)
        rounded = _round_half_even((values_kl - coder.pivot) * coder.inverse)
        codes = _clamp(rounded, coder.lowest, coder.highest) - coder.lowest
        headers = torch.where(usable, header_k2, torch.nan).view(torch.uint8)
        return headers, torch.where(usable, codes, 0.0).to(torch.uint8)

    def decode_rows(self, headers_kh: Tensor, payloads_kp: Tensor, length: int) -> Tensor:
        coder = _make_coder(headers_kh.view(torch.float32))
        values_kl = coder.pivot + (payloads_kp.to(torch.float32) + coder.lowest) * coder.step
        return torch.where(coder.usable, _clamp(values_kl, coder.min, coder.max), torch.nan)


register_codec(MinMaxUInt8Format())
