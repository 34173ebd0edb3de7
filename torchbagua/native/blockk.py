"""BlockK in plain torch; docs/arithmetic.md has the formulas."""

from __future__ import annotations

import torch
from torch import Tensor

from torchbagua.native.block_format import Group, define_operations
from torchbagua.native.sparse import SparseFormat

_INDEX_BYTES = 2


class BlockKFormat(SparseFormat):
    """One run of adjacent elements of a block is sent, with the number of the run."""

    name = "blockk"

    def index_sizes(self, table: Tensor) -> Tensor:
        return torch.full_like(table[:, 4], _INDEX_BYTES)

    def most_index_bytes(self, block: int, kept: int, num_blocks: int, most_kept: int) -> int:
        return _INDEX_BYTES * num_blocks

    def choose(self, group: Group, values_kl: Tensor) -> Tensor:
        starts = self._starts(group)
        runs_krn = values_kl.double()[:, starts[:, None] + torch.arange(group.kept, device=starts.device)]
        sums_kr = torch.zeros_like(runs_krn[:, :, 0])
        for values_kr in runs_krn.unbind(2):
            sums_kr += values_kr * values_kr
        return self._indices(group, sums_kr.argmax(dim=1, keepdim=True))

    def pack(self, group: Group, indices_kn: Tensor) -> Tensor:
        runs_k1 = -(-indices_kn[:, :1] // group.kept)  # the last run may begin between two multiples of its length
        return torch.cat((runs_k1 & 255, runs_k1 >> 8), dim=1).to(torch.uint8)

    def unpack(self, group: Group, bytes_ki: Tensor) -> tuple[Tensor, Tensor]:
        runs_k1 = bytes_ki[:, :1].long() + 256 * bytes_ki[:, 1:].long()
        num_runs = len(self._starts(group))
        return self._indices(group, runs_k1.clamp(max=num_runs - 1)), runs_k1 < num_runs

    def _starts(self, group: Group) -> Tensor:
        length = group.elements.shape[1]
        return torch.arange(0, length, group.kept, device=group.elements.device).clamp(max=length - group.kept)

    def _indices(self, group: Group, runs_k1: Tensor) -> Tensor:
        return self._starts(group)[runs_k1] + torch.arange(group.kept, device=runs_k1.device)


define_operations(BlockKFormat())
