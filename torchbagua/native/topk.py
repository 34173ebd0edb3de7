"""TopK in plain torch; docs/arithmetic.md has the formulas."""

from __future__ import annotations

import torch
from torch import Tensor

from torchbagua.native.block_format import Group, define_operations
from torchbagua.native.sparse import LONGEST_BLOCK, SparseFormat


def index_bits(length: int) -> int:
    """Return the number of bits of an index into a block of `length` elements."""
    return (length - 1).bit_length()


def _index_bits(lengths: Tensor) -> Tensor:
    """Return the same for each of `lengths`, which are at most LONGEST_BLOCK."""
    powers = 1 << torch.arange(LONGEST_BLOCK.bit_length(), device=lengths.device)
    return torch.searchsorted(powers, lengths.contiguous())


def _pack(indices_kn: Tensor, bits: int) -> Tensor:
    """Return numbers [K, N] of `bits` bits as bytes [K, P] uint8, one after the other, the lowest bit first."""
    each = indices_kn[:, :, None] >> torch.arange(bits, device=indices_kn.device) & 1
    stream = torch.nn.functional.pad(each.flatten(1), (0, -indices_kn.shape[1] * bits % 8))
    weights = 1 << torch.arange(8, device=indices_kn.device)
    return (stream.view(len(indices_kn), -1, 8) * weights).sum(dim=2).to(torch.uint8)


def _unpack(bytes_kp: Tensor, count: int, bits: int) -> Tensor:
    """Return the numbers [K, count] int64 in such bytes."""
    stream = bytes_kp[:, :, None].long() >> torch.arange(8, device=bytes_kp.device) & 1
    each = stream.flatten(1)[:, : count * bits].view(len(bytes_kp), count, bits)
    return (each << torch.arange(bits, device=bytes_kp.device)).sum(dim=2)


class TopKFormat(SparseFormat):
    """The elements of largest magnitude are sent, with their indices."""

    name = "topk"

    def index_sizes(self, table: Tensor) -> Tensor:
        return (table[:, 4] * _index_bits(table[:, 1]) + 7) // 8

    def most_index_bytes(self, block: int, kept: int, num_blocks: int, most_kept: int) -> int:
        bits = index_bits(block)
        return min((most_kept * bits + 7 * num_blocks) // 8, num_blocks * (-(-kept * bits // 8)))

    def choose(self, group: Group, values_kl: Tensor) -> Tensor:
        magnitudes_kl = values_kl.view(torch.int32) & 0x7FFFFFFF
        order_kl = magnitudes_kl.sort(dim=1, descending=True, stable=True).indices
        return order_kl[:, : group.kept].sort(dim=1).values

    def pack(self, group: Group, indices_kn: Tensor) -> Tensor:
        return _pack(indices_kn, index_bits(group.elements.shape[1]))

    def unpack(self, group: Group, bytes_ki: Tensor) -> tuple[Tensor, Tensor]:
        length = group.elements.shape[1]
        indices_kn = _unpack(bytes_ki, group.kept, index_bits(length))
        good_k1 = (indices_kn.diff(dim=1) > 0).all(dim=1, keepdim=True)
        return indices_kn, good_k1 & (indices_kn[:, -1:] < length)


define_operations(TopKFormat())
