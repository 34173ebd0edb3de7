"""The mean of this rank's row of a tensor with one row for each rank, flat or hierarchical. FSDP needs it.

Shape suffixes: N elements, L elements of a row, S elements of the rows of one rank on every node.
"""

from dataclasses import replace
from itertools import chain

import torch

from torchbagua.codecs.base import Compressor, TensorSpec, sum_dtype
from torchbagua.collectives.mean import RankChunks, reduce_scatter
from torchbagua.collectives.process_group import BaguaProcessGroup


def ranks_by_place(group: BaguaProcessGroup, device: torch.device) -> torch.Tensor:
    """Return the ranks in the order of their places on nodes: first the first rank of every node."""
    return torch.tensor(list(chain.from_iterable(zip(*group.node_ranks, strict=True))), device=device)


class RowMean:
    """Every rank gets the mean of its row over all ranks.

    If hierarchical, the ranks of a node sum the rows for the ranks that have their place on any node. Ranks with the
    same place then exchange the sums. A row is sent between nodes once for each node instead of once for each rank.
    """

    def __init__(
        self,
        group: BaguaProcessGroup,
        compressor: Compressor,
        row: TensorSpec,
        *,
        divisor: float,
        intra_compressor: Compressor | None = None,
    ) -> None:
        self._num_rows = group.size
        self._divisor = divisor
        self._order: torch.Tensor | None = None
        if intra_compressor is None or group.intra_node is None:
            self._chunks = RankChunks.of_rows(group.world, compressor, row)
            return
        assert group.inter_node is not None
        self._order = ranks_by_place(group, row.device)
        num_nodes = len(group.node_ranks)
        self._within = RankChunks.of_rows(group.intra_node, intra_compressor, row, num_nodes)
        sums = replace(row, dtype=sum_dtype(row.dtype))
        self._sums_dtype, self._sums_bytes = sums.dtype, num_nodes * row.num_elements * sums.dtype.itemsize
        self._chunks = RankChunks.of_rows(group.inter_node, compressor, sums)

    def __call__(self, x_N: torch.Tensor, out_L: torch.Tensor) -> None:
        """Write the mean of this rank's row to `out_L`, in the dtype of sums. `x_N` is unchanged."""
        if self._order is None:
            reduce_scatter(self._chunks, x_N, out_L, divisor=self._divisor)
            return
        # Scratch memory: each layer has a mean, and separate sums for each would take many times the shards' memory.
        memory = self._within.communicator.scratch("sums of rows", self._sums_bytes, x_N.device)
        sums_S = memory.view(self._sums_dtype)
        reduce_scatter(self._within, x_N.view(self._num_rows, -1).index_select(0, self._order).view(-1), sums_S)
        reduce_scatter(self._chunks, sums_S, out_L, divisor=self._divisor)
