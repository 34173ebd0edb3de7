"""The min-max codecs in plain torch; docs/arithmetic.md has the formulas.

Every line is one float32 operation, because eager torch does not compute `255.0 / t`, `lerp`, `addcmul` and `alpha=` as
they are written.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from torchbagua.native.block_format import NARROWEST, UNUSABLE_MAGNITUDE, BlockFormat, round_half_even


class _Coder(NamedTuple):
    """Headers unpacked for encoding and decoding, [K, 1] each."""

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


def _clamp(values: Tensor, low: Tensor, high: Tensor) -> Tensor:
    raised = torch.where(low > values, low, values)
    return torch.where(high < raised, high, raised)


def _make_coder(range_k2: Tensor, num_steps: int) -> _Coder:
    low, high = range_k2[:, :1], range_k2[:, 1:]
    usable = (_magnitude(range_k2) < UNUSABLE_MAGNITUDE).all(dim=1, keepdim=True) & (low <= high)
    zero = torch.zeros_like(low)
    pivot = torch.where(low > 0, low, torch.where(high < 0, high, zero))
    span = high - low
    steps = torch.full_like(span, num_steps)
    narrow = span < NARROWEST
    inverse = torch.where(narrow, zero, torch.div(steps, span))
    step = torch.where(narrow, zero, torch.div(span, steps))
    highest = round_half_even((high - pivot) * inverse)
    return _Coder(low, high, pivot, inverse, step, highest - steps, highest, usable)


class MinMaxFormat(BlockFormat):
    """A range in the header, and codes that count steps of the range. A subclass defines the byte layout of both.

    Attributes:
        num_steps: the largest code.
        unusable_magnitude: the bits of the smallest magnitude that a block cannot encode.
    """

    num_steps: ClassVar[int]
    unusable_magnitude: ClassVar[int] = UNUSABLE_MAGNITUDE

    @abstractmethod
    def widened(self, range_k2: Tensor) -> Tensor:
        """Return the smallest ranges that a header can store around ranges [K, 2] float32, minimum and maximum."""

    @abstractmethod
    def pack_range(self, range_k2: Tensor) -> Tensor:
        """Return the headers [K, H] uint8 of ranges that `widened` returned."""

    @abstractmethod
    def unpack_range(self, headers_kh: Tensor) -> Tensor:
        """Return the ranges [K, 2] float32 of headers."""

    @abstractmethod
    def pack_codes(self, codes_kl: Tensor) -> Tensor:
        """Return the payloads [K, P] uint8 of codes [K, L] uint8."""

    @abstractmethod
    def unpack_codes(self, payloads_kp: Tensor, length: int) -> Tensor:
        """Return the codes [K, length] uint8 of payloads."""

    def encode_rows(self, values_kl: Tensor) -> tuple[Tensor, Tensor]:
        usable = (_magnitude(values_kl) < self.unusable_magnitude).all(dim=1, keepdim=True)
        values_kl = torch.where(usable, values_kl, 0.0)
        extremes_k2 = torch.stack((values_kl.amin(dim=1), values_kl.amax(dim=1)), dim=1) + 0.0  # -0 becomes +0
        range_k2 = self.widened(extremes_k2)
        coder = _make_coder(range_k2, self.num_steps)
        rounded = round_half_even((values_kl - coder.pivot) * coder.inverse)
        codes = _clamp(rounded, coder.lowest, coder.highest) - coder.lowest
        headers = self.pack_range(torch.where(usable, range_k2, torch.nan))
        return headers, self.pack_codes(torch.where(usable, codes, 0.0).to(torch.uint8))

    def decode_rows(self, headers_kh: Tensor, payloads_kp: Tensor, length: int) -> Tensor:
        coder = _make_coder(self.unpack_range(headers_kh), self.num_steps)
        codes_kl = self.unpack_codes(payloads_kp, length).to(torch.float32)
        values_kl = coder.pivot + (codes_kl + coder.lowest) * coder.step
        return torch.where(coder.usable, _clamp(values_kl, coder.min, coder.max), torch.nan)
