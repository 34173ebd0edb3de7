"""The rows of all ranks in one tensor, flat or hierarchical. FSDP gathers weights with it.

Shape suffixes: N elements, L elements of a row, S elements of the rows of one rank on every node.
"""

import torch

from torchbagua.codecs.base import Compressor, Identity, TensorSpec
from torchbagua.collectives.mean import RankChunks, all_gather
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.collectives.row_mean import ranks_by_place


class RowGather:
    """Every rank gets the rows of all ranks, and decodes all of them, its own row too, so results are bitwise equal.

    If hierarchical, a rank sends its row to the ranks that have its place on other nodes. The ranks of a node then send
    each other the decoded rows, in full precision. A row is sent between nodes once for each node instead of once for
    each rank, and is bitwise equal to the flat result.
    """

    def __init__(
        self, group: BaguaProcessGroup, compressor: Compressor, row: TensorSpec, *, hierarchical: bool
    ) -> None:
        self._num_rows = group.size
        self._order: torch.Tensor | None = None
        if not hierarchical or group.intra_node is None:
            self._chunks = RankChunks.of_rows(group.world, compressor, row)
            return
        assert group.inter_node is not None
        self._order = ranks_by_place(group, row.device)
        self._chunks = RankChunks.of_rows(group.inter_node, compressor, row)
        self._within = RankChunks.of_rows(group.intra_node, Identity(), row, len(group.node_ranks))

    def __call__(self, x_L: torch.Tensor, out_N: torch.Tensor) -> None:
        """Write the rows of all ranks to `out_N`. `x_L` is this rank's, and may be a view of its place."""
        if self._order is None:
            all_gather(self._chunks, x_L, out_N)
            return
        by_place_N = torch.empty_like(out_N)
        own_S = by_place_N[self._within.own]
        all_gather(self._chunks, x_L, own_S)
        all_gather(self._within, own_S, by_place_N)
        rows = (self._num_rows, -1)
        out_N.view(rows).index_copy_(0, self._order, by_place_N.view(rows))
