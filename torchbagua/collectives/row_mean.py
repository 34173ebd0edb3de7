"""The mean of own row of a tensor with one row for each rank: what FSDP needs, flat or by way of nodes.

Shape suffixes: N elements, L elements of a row, S elements of the rows of one rank on every node.
"""

from dataclasses import replace
from itertools import chain

import torch

from torchbagua.codecs.base import Compressor, sum_dtype
from torchbagua.codecs.blocks import TensorSpec
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.collectives.rank_chunks import RankChunks
from torchbagua.collectives.reduce_scatter import reduce_scatter


def ranks_by_place(group: BaguaProcessGroup, device: torch.device) -> torch.Tensor:
    """Return the ranks in the order of their places in nodes: those that are the first of their nodes come first."""
    return torch.tensor(list(chain.from_iterable(zip(*group.node_ranks, strict=True))), device=device)


class RowMean:
    """Every rank gets the mean of its own row over all ranks.

    By way of nodes: ranks add up, within each node, the rows of those that have their place on any node; then the sums
    are exchanged between these. A row crosses between nodes once for each node and not for each rank.

    Args:
        group: who takes part; by way of nodes, with equally many ranks on each.
        compressor: how rows are sent, by way of nodes between these. It encodes the dtypes of rows and sums.
        row: the description of a row, which is the same for all ranks.
        divisor: of the sum.
        intra_compressor: how rows are sent within nodes; None to send them flat, without respect to nodes.
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
        """Write the mean of own row to `out_L`, in the dtype that sums are formed in. `x_N` is left as it is.

        Raises:
            CommunicationError: a peer is gone or did not take part within the group's timeout.
        """
        if self._order is None:
            reduce_scatter(self._chunks, x_N, out_L, divisor=self._divisor)
            return
        # Scratch: there is a mean for each layer, and sums that each keeps would take many times what shards do.
        memory = self._within.communicator.scratch("sums of rows", self._sums_bytes, x_N.device)
        sums_S = memory.view(self._sums_dtype)
        reduce_scatter(self._within, x_N.view(self._num_rows, -1).index_select(0, self._order).view(-1), sums_S)
        reduce_scatter(self._chunks, sums_S, out_L, divisor=self._divisor)
