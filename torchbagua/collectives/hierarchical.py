"""The combinator that respects node boundaries: full precision within nodes, any collective between them.

Shape suffixes: N elements, R ranks, L elements of a shard.
"""

from collections.abc import Callable
from typing import Any

import torch

from torchbagua.collectives.communicator import Communicator
from torchbagua.collectives.exchange import Exchange
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.compressors import Identity
from torchbagua.compressors.blocks import deal_blocks
from torchbagua.compressors.cast import sum_of_rows

Inner = Callable[..., None]
"""Replaces a shard's node sum, float32 or float64, its first argument, by the result for that shard, in place."""


class Hierarchical:
    """What nodes agree on, from the sums of their ranks' tensors.

    With S shards, S the smallest number of ranks on a node, so that all network cards work:
    1. In the node, rank s < S receives shard s from all its ranks and adds them in rank order, in float32 or
       float64.
    2. The owners of the same shard on all nodes run the inner collective on the node sums.
    3. In the node, the owners send the results, in the tensor's dtype, to all its ranks.

    Args:
        group: with several nodes, of which one has several ranks.
        bounds_B: the tensor's blocks.
        dtype, device: of the tensor.
        make_inner: returns the inner collective of (communicator between owners, shard, the shard's own blocks); called
            on ranks that own a shard.
        bucket: the tensor's name, for events and errors.
    """

    def __init__(
        self,
        group: BaguaProcessGroup,
        bounds_B: torch.Tensor,
        dtype: torch.dtype,
        device: torch.device,
        make_inner: Callable[[Communicator, slice, torch.Tensor], Inner],
        bucket: str,
    ) -> None:
        assert group.intra_node is not None
        self._intra_node = group.intra_node
        self._bucket = bucket
        cuts = deal_blocks(bounds_B, group.num_shards)
        layout = Identity().layout(bounds_B, cuts, dtype, device)
        # Ranks of larger nodes that own no shard still send and receive.
        nothing = slice(0, 0)
        self._shards = [*layout.elements, *[nothing] * (self._intra_node.size - group.num_shards)]
        self._inner: Inner | None = None
        if group.inter_node is not None:
            index = self._intra_node.rank
            own = self._shards[index]
            self._inner = make_inner(group.inter_node, own, bounds_B[cuts[index] : cuts[index + 1] + 1] - own.start)

    def __call__(self, x_N: torch.Tensor, *details: Any) -> None:
        """Replace `x_N` by the result, in place; `details` are handed on to the inner collective.

        Raises:
            CommunicationError: a peer is gone or did not take part within the group's timeout.
        """
        intra_node = self._intra_node
        shards = [x_N[shard] for shard in self._shards]
        own = shards[intra_node.rank]
        rows = intra_node.scratch("rows", intra_node.size * own.nbytes, x_N.device)
        rows_RL = rows.view(x_N.dtype).view(intra_node.size, own.numel())
        scatter = Exchange(intra_node, "all_to_all", list(rows_RL), self._bucket)
        # Made before own shards are sent, into which it receives: a rank sends a result only when it has received that
        # shard from everybody.
        gather = Exchange(intra_node, "all_gather", shards, self._bucket)
        scatter.expect()
        rows_RL[intra_node.rank].copy_(own)
        scatter.run(lambda peer: shards[peer])
        gather.expect()
        if self._inner is not None:
            with intra_node.span("reduce", self._bucket, operation="all_to_all", num_elements=own.numel()):
                sum_L = sum_of_rows(rows_RL)
            self._inner(sum_L, *details)
            own.copy_(sum_L)
        gather.run(lambda peer: own)
