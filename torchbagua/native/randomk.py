"""RandomK in plain torch; docs/arithmetic.md has the formulas."""

from __future__ import annotations

import torch
from torch import Tensor

from torchbagua.native.block_format import Group, define_operations
from torchbagua.native.ops import DRAWN_TABLE
from torchbagua.native.sparse import SparseFormat

_LOW = 0xFFFFFFFF


def philox(keys_k1: Tensor, num_words: int) -> Tensor:
    """The first words [K, num_words] of Philox4x32-10 for keys [K, 1] int64 and the counters (0, 0, 0, 0), (1, 0, 0, 0)
    and so on, as int64 from 0 to 2^32 - 1."""
    device = keys_k1.device
    factors, steps = torch.tensor([[0xD2511F53, 0xCD9E8D57], [0x9E3779B9, 0xBB67AE85]], device=device)
    counters = torch.arange(-(-num_words // 4), device=device).expand(len(keys_k1), -1)
    even, odd = torch.stack((counters, torch.zeros_like(counters)), dim=2), torch.zeros_like(factors)  # two words each
    keys = torch.stack((keys_k1, keys_k1 >> 32), dim=2) & _LOW
    for _ in range(10):
        products = even * factors  # which wraps around, and has all its 64 bits
        even = (products >> 32 & _LOW).flip(2) ^ odd ^ keys
        odd = (products & _LOW).flip(2)
        keys = keys + steps & _LOW
    return torch.stack((even, odd), dim=3).flatten(1)[:, :num_words]


class RandomKFormat(SparseFormat):
    """One element of each of as many strata as are kept; who has the block's key knows which, and no index travels."""

    name = "randomk"
    table = DRAWN_TABLE
    further_fields = ", key"

    def index_sizes(self, table: Tensor) -> Tensor:
        return torch.zeros_like(table[:, 4])

    def most_index_bytes(self, block: int, kept: int, num_blocks: int, most_kept: int) -> int:
        return 0

    def choose(self, group: Group, values_kl: Tensor) -> Tensor:
        return self._drawn(group)

    def pack(self, group: Group, indices_kn: Tensor) -> Tensor:
        return indices_kn.new_zeros(len(indices_kn), 0, dtype=torch.uint8)

    def unpack(self, group: Group, bytes_ki: Tensor) -> tuple[Tensor, Tensor]:
        good_k1 = torch.ones(len(bytes_ki), 1, dtype=torch.bool, device=bytes_ki.device)
        return self._drawn(group), good_k1

    def _drawn(self, group: Group) -> Tensor:
        bounds = torch.arange(group.kept + 1, device=group.keys.device) * group.elements.shape[1] // group.kept
        return bounds[:-1] + (philox(group.keys, group.kept) * bounds.diff() >> 32)


define_operations(RandomKFormat())
