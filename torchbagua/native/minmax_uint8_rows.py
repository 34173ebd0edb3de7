"""MinMaxUInt8 in plain torch, of K blocks of L elements each as the rows of a matrix.

Every line is one float32 operation, because eager torch computes `255.0 / t`, `lerp`, `addcmul` and `alpha=` otherwise
than they read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchbagua.native.schema import UNUSABLE_MAGNITUDE

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


def encode_rows(values_kl: Tensor) -> tuple[Tensor, Tensor]:
    """Headers [K, 2] float32 and codes [K, L] uint8 of K blocks [K, L] float32."""
    usable = (_magnitude(values_kl) < UNUSABLE_MAGNITUDE).all(dim=1, keepdim=True)
    values_kl = torch.where(usable, values_kl, 0.0)
    header_k2 = torch.stack((values_kl.amin(dim=1), values_kl.amax(dim=1)), dim=1) + 0.0  # -0 becomes +0
    coder = _make_coder(header_k2)
    rounded = _round_half_even((values_kl - coder.pivot) * coder.inverse)
    codes = _clamp(rounded, coder.lowest, coder.highest) - coder.lowest
    return torch.where(usable, header_k2, torch.nan), torch.where(usable, codes, 0.0).to(torch.uint8)


def decode_rows(header_k2: Tensor, codes_kl: Tensor) -> Tensor:
    """The K blocks [K, L] float32 of headers [K, 2] and codes [K, L]."""
    coder = _make_coder(header_k2)
    values_kl = coder.pivot + (codes_kl.to(torch.float32) + coder.lowest) * coder.step
    return torch.where(coder.usable, _clamp(values_kl, coder.min, coder.max), torch.nan)
