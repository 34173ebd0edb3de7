"""The native operations in plain torch, for every device: the kernels of last resort, and the bytes to compare with.

Blocks of equal length are coded together as the rows of one matrix, see minmax_uint8_rows.py and sign_1bit_rows.py.
Shapes: K blocks, L elements, H header bytes, P payload bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchbagua.native import minmax_uint8_rows, sign_1bit_rows
from torchbagua.native.schema import (
    CODECS,
    BlockFormat,
    check_codec,
    check_feedback,
    check_forms,
    check_mean,
    check_mean_encode,
    check_qadam,
    refusal,
)


class _Group(NamedTuple):
    """Blocks of one length: where they lie in x [K, L], and in the wire their headers [K, H] and payloads [K, P]."""

    elements: Tensor
    header: Tensor
    payload: Tensor


def _check_blocks(
    operation: str, block_format: BlockFormat, table: Tensor, num_elements: int | None, wire_bytes: int
) -> None:
    """Raise ValueError for a block outside x, where its elements are counted, or outside the wire."""
    start, length, header, payload = table.unbind(1)
    payload_bytes = block_format.payload_bytes(length)
    good = (length >= 1) & (header >= 0) & (header % 4 == 0) & (header <= wire_bytes - block_format.header_bytes)
    good &= (payload_bytes <= wire_bytes) & (payload >= 0) & (payload <= wire_bytes - payload_bytes)
    if num_elements is not None:
        good &= (length <= num_elements) & (start >= 0) & (start <= num_elements - length)
    if not bool(good.all()):
        row = int((~good).nonzero()[0])
        elements = "" if num_elements is None else f"{num_elements} elements of x and "
        allowed = "rows (start, length >= 1, header at a multiple of 4, payload) of blocks within "
        allowed += f"{elements}{wire_bytes} bytes of wire"
        raise refusal(operation, "table", allowed, f"row {row} = {tuple(table[row].tolist())}")


@dataclass(frozen=True)
class _Codec:
    """The operations of one codec.

    Attributes:
        name: the beginning of the operations' names.
        encode_rows: headers [K, H / 4] float32 and payloads [K, P] uint8 of blocks [K, L] float32.
        decode_rows: the blocks, of L elements or more, of headers and payloads.
    """

    name: str
    encode_rows: Callable[[Tensor], tuple[Tensor, Tensor]]
    decode_rows: Callable[[Tensor, Tensor], Tensor]

    def encode(self, x: Tensor, table: Tensor, wire: Tensor) -> None:
        """`torchbagua::<name>_encode`, see schema.py."""
        check_codec(f"{self.name}_encode", x, table, wire)
        _check_blocks(f"{self.name}_encode", CODECS[self.name], table, x.numel(), wire.numel())
        for group in self._groups(table):
            self._write(wire, group, x[group.elements].to(torch.float32))

    def decode(self, wire: Tensor, table: Tensor, x: Tensor) -> None:
        """`torchbagua::<name>_decode`, see schema.py."""
        check_codec(f"{self.name}_decode", x, table, wire)
        _check_blocks(f"{self.name}_decode", CODECS[self.name], table, x.numel(), wire.numel())
        for group in self._groups(table):
            x[group.elements] = self._read(wire, group).to(x.dtype)

    def decode_mean(self, rows: Tensor, table: Tensor, divisor: float, x: Tensor) -> None:
        """`torchbagua::<name>_decode_mean`, see schema.py."""
        check_mean(f"{self.name}_decode_mean", rows, table, divisor, x)
        _check_blocks(f"{self.name}_decode_mean", CODECS[self.name], table, x.numel(), rows.shape[1])
        for group in self._groups(table):
            x[group.elements] = self._mean(rows, group, divisor)

    def decode_mean_encode(self, rows: Tensor, table: Tensor, divisor: float, wire: Tensor) -> None:
        """`torchbagua::<name>_decode_mean_encode`, see schema.py."""
        check_mean_encode(f"{self.name}_decode_mean_encode", rows, table, divisor, wire)
        _check_blocks(f"{self.name}_decode_mean_encode", CODECS[self.name], table, None, wire.numel())
        for group in self._groups(table):
            self._write(wire, group, self._mean(rows, group, divisor))

    def encode_feedback(self, x: Tensor, residual: Tensor, table: Tensor, wire: Tensor, left_out: Tensor) -> None:
        """`torchbagua::<name>_encode_feedback`, see schema.py."""
        check_feedback(f"{self.name}_encode_feedback", x, residual, table, wire, left_out)
        _check_blocks(f"{self.name}_encode_feedback", CODECS[self.name], table, x.numel(), wire.numel())
        for group in self._groups(table):
            total_kl = x[group.elements] + residual[group.elements]
            self._write(wire, group, total_kl)
            left_out[group.elements] = total_kl - self._read(wire, group)

    def _groups(self, table: Tensor) -> Iterator[_Group]:
        header_offsets = torch.arange(CODECS[self.name].header_bytes, device=table.device)
        for length in table[:, 1].unique():
            blocks = table[table[:, 1] == length]
            offsets = torch.arange(int(length), device=table.device)
            payload_offsets = offsets[: int(CODECS[self.name].payload_bytes(length))]
            yield _Group(blocks[:, :1] + offsets, blocks[:, 2:3] + header_offsets, blocks[:, 3:] + payload_offsets)

    def _read(self, wire: Tensor, group: _Group) -> Tensor:
        """The blocks [K, L] float32 of a wire."""
        values = self.decode_rows(wire[group.header].view(torch.float32), wire[group.payload])
        return values[:, : group.elements.shape[1]]

    def _mean(self, rows: Tensor, group: _Group, divisor: float) -> Tensor:
        """The mean [K, L] float32 of the blocks of all rows."""
        total_kl = self._read(rows[0], group)
        for row in rows[1:]:
            total_kl = total_kl + self._read(row, group)
        return torch.div(total_kl, torch.full_like(total_kl, divisor))

    def _write(self, wire: Tensor, group: _Group, values_kl: Tensor) -> None:
        header, payload_kp = self.encode_rows(values_kl)
        wire[group.header] = header.view(torch.uint8)
        wire[group.payload] = payload_kp


_MINMAX_UINT8 = _Codec("minmax_uint8", minmax_uint8_rows.encode_rows, minmax_uint8_rows.decode_rows)
minmax_uint8_encode = _MINMAX_UINT8.encode
minmax_uint8_decode = _MINMAX_UINT8.decode
minmax_uint8_decode_mean = _MINMAX_UINT8.decode_mean
minmax_uint8_decode_mean_encode = _MINMAX_UINT8.decode_mean_encode
minmax_uint8_encode_feedback = _MINMAX_UINT8.encode_feedback

_SIGN_1BIT = _Codec("sign_1bit", sign_1bit_rows.encode_rows, sign_1bit_rows.decode_rows)
sign_1bit_encode = _SIGN_1BIT.encode
sign_1bit_decode = _SIGN_1BIT.decode
sign_1bit_decode_mean = _SIGN_1BIT.decode_mean
sign_1bit_decode_mean_encode = _SIGN_1BIT.decode_mean_encode
sign_1bit_encode_feedback = _SIGN_1BIT.encode_feedback


def qadam_update(
    weights: list[Tensor],
    gradients: list[Tensor],
    momenta: list[Tensor],
    second_moments: list[Tensor],
    **numbers: float,
) -> None:
    """`torchbagua::qadam_update`, see schema.py."""
    check_qadam(weights, gradients=gradients, momenta=momenta, second_moments=second_moments)
    for tensors in zip(weights, gradients, momenta, second_moments, strict=True):
        _update_one(tensors, torch.float32, **numbers)


def qadam_update_double(
    weights: list[Tensor],
    gradients: list[Tensor],
    momenta: list[Tensor],
    second_moments: list[Tensor],
    **numbers: float,
) -> None:
    """The same for tensors of float64, in float64: an operation has kernels for what codecs encode."""
    for tensors in zip(weights, gradients, momenta, second_moments, strict=True):
        _update_one(tensors, torch.float64, **numbers)


def _update_one(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    dtype: torch.dtype,
    *,
    gradient_sign: float,
    weight_decay: float,
    shrink: float,
    beta1: float,
    root_correction2: float,
    eps: float,
    largest_ratio: float,
    step_size: float,
) -> None:
    weight, gradient, momentum, second_moment = tensors
    kept = weight.to(dtype) * shrink
    slope = gradient.to(dtype) * gradient_sign + kept * weight_decay
    moved = momentum.to(dtype) * beta1 + slope * (1.0 - beta1)
    variance = second_moment.to(dtype)
    denominator = torch.div(variance.sqrt(), torch.full_like(variance, root_correction2)) + eps
    distance = torch.div(moved, denominator).clamp(-largest_ratio, largest_ratio) * step_size
    momentum.copy_(moved)
    weight.copy_(kept - torch.where(variance == 0, 0.0, distance))


def qadam_form_momenta(gradients: list[Tensor], momenta: list[Tensor], *, beta1: float, share: float) -> None:
    """`torchbagua::qadam_form_momenta`, see schema.py."""
    check_forms("qadam_form_momenta", "gradients", gradients, momenta)
    for gradient, momentum in zip(gradients, momenta, strict=True):
        gradient.mul_(share).add_(momentum.float() * beta1)


def qadam_form_gradients(averages: list[Tensor], momenta: list[Tensor], *, beta1: float, share: float) -> None:
    """`torchbagua::qadam_form_gradients`, see schema.py."""
    check_forms("qadam_form_gradients", "averages", averages, momenta)
    for average, momentum in zip(averages, momenta, strict=True):
        average.sub_(momentum.float() * beta1).div_(torch.full((1,), share, device=average.device))


for _codec in (_MINMAX_UINT8, _SIGN_1BIT):
    for _kernel in (
        _codec.encode,
        _codec.decode,
        _codec.decode_mean,
        _codec.decode_mean_encode,
        _codec.encode_feedback,
    ):
        torch.library.impl(f"torchbagua::{_codec.name}_{_kernel.__name__}", "default", _kernel)
for _qadam_kernel in (qadam_update, qadam_form_momenta, qadam_form_gradients):
    torch.library.impl(f"torchbagua::{_qadam_kernel.__name__}", "default", _qadam_kernel)
