"""The native operations in plain torch, for every device: the kernels of last resort, and the bytes to compare with.

Blocks of equal length are coded together as the rows of one matrix. Every line is one float32 operation, because eager
torch computes `255.0 / t`, `lerp`, `addcmul` and `alpha=` otherwise than they read. Shapes: K blocks, L elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torchbagua.native.schema import check_codec, check_mean, check_qadam, refusal

_HEADER_BYTES = 8
_UNUSABLE_MAGNITUDE = 0x7E800000  # bits of 2^126
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
    usable = (_magnitude(header_k2) < _UNUSABLE_MAGNITUDE).all(dim=1, keepdim=True) & (low <= high)
    zero = torch.zeros_like(low)
    pivot = torch.where(low > 0, low, torch.where(high < 0, high, zero))
    span = high - low
    steps = torch.full_like(span, 255.0)
    narrow = span < _NARROWEST_RANGE
    inverse = torch.where(narrow, zero, torch.div(steps, span))
    step = torch.where(narrow, zero, torch.div(span, steps))
    highest = _round_half_even((high - pivot) * inverse)
    return _Coder(low, high, pivot, inverse, step, highest - steps, highest, usable)


def _encode_rows(values_kl: Tensor) -> tuple[Tensor, Tensor]:
    """Headers [K, 2] float32 and codes [K, L] uint8 of K blocks [K, L] float32."""
    usable = (_magnitude(values_kl) < _UNUSABLE_MAGNITUDE).all(dim=1, keepdim=True)
    values_kl = torch.where(usable, values_kl, 0.0)
    header_k2 = torch.stack((values_kl.amin(dim=1), values_kl.amax(dim=1)), dim=1) + 0.0  # -0 becomes +0
    coder = _make_coder(header_k2)
    rounded = _round_half_even((values_kl - coder.pivot) * coder.inverse)
    codes = _clamp(rounded, coder.lowest, coder.highest) - coder.lowest
    return torch.where(usable, header_k2, torch.nan), torch.where(usable, codes, 0.0).to(torch.uint8)


def _decode_rows(header_k2: Tensor, codes_kl: Tensor) -> Tensor:
    """The K blocks [K, L] float32 of headers [K, 2] and codes [K, L]."""
    coder = _make_coder(header_k2)
    values_kl = coder.pivot + (codes_kl.to(torch.float32) + coder.lowest) * coder.step
    return torch.where(coder.usable, _clamp(values_kl, coder.min, coder.max), torch.nan)


class _Group(NamedTuple):
    """Blocks of one length: where they lie in x [K, L], and in the wire their headers [K, 8] and payloads [K, L]."""

    elements: Tensor
    header: Tensor
    payload: Tensor


def _groups(table: Tensor) -> Iterator[_Group]:
    for length in table[:, 1].unique().tolist():
        blocks = table[table[:, 1] == length]
        offsets = torch.arange(length, device=table.device)
        header_offsets = torch.arange(_HEADER_BYTES, device=table.device)
        yield _Group(blocks[:, :1] + offsets, blocks[:, 2:3] + header_offsets, blocks[:, 3:] + offsets)


def _read(wire: Tensor, group: _Group) -> Tensor:
    """The blocks [K, L] float32 of a wire."""
    return _decode_rows(wire[group.header].view(torch.float32), wire[group.payload])


def _write(wire: Tensor, group: _Group, values_kl: Tensor) -> None:
    header_k2, codes_kl = _encode_rows(values_kl)
    wire[group.header] = header_k2.view(torch.uint8)
    wire[group.payload] = codes_kl


def _check_blocks(operation: str, table: Tensor, num_elements: int | None, wire_bytes: int) -> None:
    """Raise ValueError for a block outside x, where its elements are counted, or outside the wire."""
    start, length, header, payload = table.unbind(1)
    good = (length >= 1) & (header >= 0) & (header % 4 == 0) & (header <= wire_bytes - _HEADER_BYTES)
    good &= (length <= wire_bytes) & (payload >= 0) & (payload <= wire_bytes - length)
    if num_elements is not None:
        good &= (length <= num_elements) & (start >= 0) & (start <= num_elements - length)
    if not bool(good.all()):
        row = int((~good).nonzero()[0])
        elements = "" if num_elements is None else f"{num_elements} elements of x and "
        allowed = "rows (start, length >= 1, header at a multiple of 4, payload) of blocks within "
        allowed += f"{elements}{wire_bytes} bytes of wire"
        raise refusal(operation, "table", allowed, f"row {row} = {tuple(table[row].tolist())}")


def minmax_uint8_encode(x: Tensor, table: Tensor, wire: Tensor) -> None:
    """`torchbagua::minmax_uint8_encode`, see schema.py."""
    check_codec("minmax_uint8_encode", x, table, wire)
    _check_blocks("minmax_uint8_encode", table, x.numel(), wire.numel())
    for group in _groups(table):
        _write(wire, group, x[group.elements].to(torch.float32))


def minmax_uint8_decode(wire: Tensor, table: Tensor, x: Tensor) -> None:
    """`torchbagua::minmax_uint8_decode`, see schema.py."""
    check_codec("minmax_uint8_decode", x, table, wire)
    _check_blocks("minmax_uint8_decode", table, x.numel(), wire.numel())
    for group in _groups(table):
        x[group.elements] = _read(wire, group).to(x.dtype)


def minmax_uint8_decode_mean_encode(rows: Tensor, table: Tensor, divisor: float, wire: Tensor) -> None:
    """`torchbagua::minmax_uint8_decode_mean_encode`, see schema.py."""
    check_mean("minmax_uint8_decode_mean_encode", rows, table, divisor, wire)
    _check_blocks("minmax_uint8_decode_mean_encode", table, None, wire.numel())
    for group in _groups(table):
        total_kl = _read(rows[0], group)
        for row in rows[1:]:
            total_kl = total_kl + _read(row, group)
        _write(wire, group, torch.div(total_kl, torch.full_like(total_kl, divisor)))


def qadam_update(
    weights: list[Tensor],
    gradients: list[Tensor],
    momenta: list[Tensor],
    second_moments: list[Tensor],
    *,
    gradient_sign: float,
    weight_decay: float,
    shrink: float,
    beta1: float,
    root_correction2: float,
    eps: float,
    step_size: float,
) -> None:
    """`torchbagua::qadam_update`, see schema.py."""
    check_qadam(weights, gradients=gradients, momenta=momenta, second_moments=second_moments)
    for weight, gradient, momentum, second_moment in zip(weights, gradients, momenta, second_moments, strict=True):
        kept = weight.float() * shrink
        slope = gradient.float() * gradient_sign + kept * weight_decay
        moved = momentum.float() * beta1 + slope * (1.0 - beta1)
        variance = second_moment.float()
        denominator = torch.div(variance.sqrt(), torch.full_like(variance, root_correction2)) + eps
        distance = torch.div(moved, denominator) * step_size
        momentum.copy_(moved)
        weight.copy_(kept - torch.where(variance == 0, 0.0, distance))


for _kernel in (minmax_uint8_encode, minmax_uint8_decode, minmax_uint8_decode_mean_encode, qadam_update):
    torch.library.impl(f"torchbagua::{_kernel.__name__}", "default", _kernel)
