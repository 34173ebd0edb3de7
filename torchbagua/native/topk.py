"""TopK in plain torch; docs/arithmetic.md has the formulas."""

from __future__ import annotations

import torch
from torch import Tensor

from torchbagua.native.block_format import UNUSABLE_MAGNITUDE, Group, TableFormat, define_operations
from torchbagua.native.ops import SPARSE_TABLE

LONGEST_BLOCK = 4096
LARGEST_CODE = 127
_NARROWEST = 2.0**-118
_ROUNDING_SHIFT = 12582912.0  # 1.5 * 2^23


def index_bits(length: int) -> int:
    """How many bits an index into a block of `length` elements takes."""
    return (length - 1).bit_length()


def _index_bits(lengths: Tensor) -> Tensor:
    """The same of each of `lengths`, which are at most LONGEST_BLOCK."""
    powers = 1 << torch.arange(LONGEST_BLOCK.bit_length(), device=lengths.device)
    return torch.searchsorted(powers, lengths.contiguous())


def _pack(indices_kn: Tensor, bits: int) -> Tensor:
    """The bytes [K, P] uint8 of numbers [K, N] of `bits` bits, one after the other, the lowest bit first."""
    each = indices_kn[:, :, None] >> torch.arange(bits, device=indices_kn.device) & 1
    stream = torch.nn.functional.pad(each.flatten(1), (0, -indices_kn.shape[1] * bits % 8))
    weights = 1 << torch.arange(8, device=indices_kn.device)
    return (stream.view(len(indices_kn), -1, 8) * weights).sum(dim=2).to(torch.uint8)


def _unpack(bytes_kp: Tensor, count: int, bits: int) -> Tensor:
    """The numbers [K, count] int64 of such bytes."""
    stream = bytes_kp[:, :, None].long() >> torch.arange(8, device=bytes_kp.device) & 1
    each = stream.flatten(1)[:, : count * bits].view(len(bytes_kp), count, bits)
    return (each << torch.arange(bits, device=bytes_kp.device)).sum(dim=2)


def _is_usable(largest: Tensor) -> Tensor:
    bits = largest.view(torch.int32)
    return (bits >= 0) & (bits < UNUSABLE_MAGNITUDE)


class TopKFormat(TableFormat):
    """The largest magnitude, float32, in the header; then the indices of the kept elements, and a byte for each."""

    name = "topk"
    header_bytes = 4
    table = SPARSE_TABLE

    def allowed_rows(self) -> str:
        rows = f"rows (start, length from 1 to {LONGEST_BLOCK}, header at a multiple of 4, payload, "
        return f"{rows}kept from 1 to length)"

    def are_allowed(self, table: Tensor) -> Tensor:
        length, kept = table[:, 1], table[:, 4]
        return super().are_allowed(table) & (length <= LONGEST_BLOCK) & (kept >= 1) & (kept <= length)

    def payload_sizes(self, table: Tensor) -> Tensor:
        kept = table[:, 4]
        return (kept * _index_bits(table[:, 1]) + 7) // 8 + kept

    def write(self, wire: Tensor, group: Group, values_kl: Tensor) -> None:
        magnitudes_kl = values_kl.view(torch.int32) & 0x7FFFFFFF
        order_kl = magnitudes_kl.sort(dim=1, descending=True, stable=True).indices
        indices_kn = order_kl[:, : group.kept].sort(dim=1).values
        largest_k1 = magnitudes_kl.amax(dim=1, keepdim=True).view(torch.float32)
        usable = _is_usable(largest_k1)
        is_narrow = largest_k1 < _NARROWEST
        inverse_k1 = torch.where(is_narrow, 0.0, torch.div(torch.full_like(largest_k1, LARGEST_CODE), largest_k1))
        scaled_kn = torch.where(usable, values_kl.gather(1, indices_kn), 0.0) * inverse_k1
        codes_kn = ((scaled_kn + _ROUNDING_SHIFT) - _ROUNDING_SHIFT) + 128.0
        payload_kp = torch.cat((_pack(indices_kn, index_bits(values_kl.shape[1])), codes_kn.to(torch.uint8)), dim=1)
        wire[group.header] = torch.where(usable, largest_k1, torch.nan).view(torch.uint8)
        wire[group.payload] = torch.where(usable, payload_kp, 0)

    def read(self, wire: Tensor, group: Group) -> Tensor:
        length = group.elements.shape[1]
        largest_k1 = wire[group.header].view(torch.float32)
        payload_kp = wire[group.payload]
        indices_kn = _unpack(payload_kp[:, : -group.kept], group.kept, index_bits(length))
        good_k1 = _is_usable(largest_k1) & (indices_kn[:, -1:] < length)
        good_k1 &= (indices_kn.diff(dim=1) > 0).all(dim=1, keepdim=True)
        steps_k1 = torch.div(largest_k1, torch.full_like(largest_k1, LARGEST_CODE))
        step_k1 = torch.where(largest_k1 < _NARROWEST, 0.0, steps_k1)
        decoded_kn = (payload_kp[:, -group.kept :].to(torch.float32) - 128.0) * step_k1 + 0.0  # -0 becomes +0
        values_kl = torch.zeros(len(payload_kp), length, device=wire.device)
        values_kl.scatter_(1, torch.where(good_k1, indices_kn, 0), decoded_kn)
        return torch.where(good_k1, values_kl, torch.nan)


define_operations(TopKFormat())
