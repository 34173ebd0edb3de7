"""The combinator that respects node boundaries: sums within nodes, any collective between them.

Shape suffixes: N elements, R ranks, L elements of a shard, W wire bytes.
"""

import math
from collections.abc import Callable
from typing import Protocol

import torch

from torchbagua.codecs.base import Compressor, sum_dtype
from torchbagua.codecs.blocks import TensorSpec
from torchbagua.codecs.cast import Identity, typed
from torchbagua.collectives.all_gather import AllGather
from torchbagua.collectives.exchange import Pipeline
from torchbagua.collectives.nodes import NodeGroups
from torchbagua.collectives.rank_chunks import RankChunks
from torchbagua.collectives.reduce_scatter import ReduceScatter
from torchbagua.transport.communicator import Communicator


class BetweenNodes(Protocol):
    """The collective between the owners of a shard, one on each node."""

    def __call__(self, sum_L: torch.Tensor, round_index: int) -> None:
        """Replace the shard's node sum, float32 or float64, by the result for that shard, in place."""
        ...


class Hierarchical:
    """What nodes agree on, from the sums of their ranks' tensors.

    With S shards, S the smallest number of ranks on a node, so that all network cards work:
    1. Reduce-scatter in the node: rank s < S gets the sum of shard s, in float32 or float64.
    2. The owners of the same shard on all nodes run the collective between nodes on the node sums.
    3. All-gather in the node: the owners send the results, in the tensor's dtype, to all its ranks.

    In 1 and 3 values may be compressed, too. All ranks of all nodes end with the same bits also then, if the collective
    of 2 gives them to all owners of a shard.

    Args:
        group: with several nodes, of which one has several ranks.
        spec: the tensor.
        block_elements: of the blocks that shards are made of.
        make_between_nodes: makes the collective of 2. from the owners' communicator, the shard and its description;
            called on ranks that own a shard.
        compressor: how what is sent within nodes looks. It encodes the tensor's dtype.
        ranks_agree: the ranks of a node hold the same tensor, so in 1 each takes its shard of that, and no sum.
    """

    def __init__(
        self,
        group: NodeGroups,
        spec: TensorSpec,
        block_elements: int,
        make_between_nodes: Callable[[Communicator, slice, TensorSpec], BetweenNodes],
        compressor: Compressor = Identity(),  # noqa: B008  # it is frozen
        *,
        ranks_agree: bool = False,
    ) -> None:
        assert group.intra_node is not None
        node = group.intra_node
        self._chunks = RankChunks(node, compressor, spec, shard_cuts(group, spec, block_elements, compressor))
        self._ranks_agree = ranks_agree
        self._between_nodes: BetweenNodes | None = None
        if group.inter_node is not None:
            shard = self._chunks.own
            shard_spec = spec.restricted_to(shard, sum_dtype(spec.dtype))
            self._between_nodes = make_between_nodes(group.inter_node, shard, shard_spec)

    def __call__(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None, round_index: int = 0) -> None:
        """Write the result to `out_N`, another tensor like `x_N`; by default in place.

        Args:
            x_N: the tensor.
            out_N: for the result.
            round_index: which round it is, for a collective between nodes that does another thing in each.

        Raises:
            CommunicationError: a peer is gone or did not take part within the group's timeout.
        """
        chunks, pipeline = self._chunks, Pipeline(self._chunks.communicator, x_N.device)
        (piece,) = chunks.pieces
        sum_L = sum_of_shard(chunks)
        gather = AllGather(
            chunks, x_N if out_N is None else out_N, pipeline
        )  # by now, so that receives are posted early
        if self._ranks_agree:
            sum_L.copy_(x_N[chunks.own])
        else:
            scatter = ReduceScatter(chunks, x_N, pipeline)
            scatter.send(piece)
            scatter.receive_mean(piece, sum_L)
            pipeline.wait_for_sends()
        if self._between_nodes is not None:
            self._between_nodes(sum_L, round_index)
        gather.send(piece, sum_L)
        gather.receive(piece)
        pipeline.wait_for_sends()


def shard_cuts(group: NodeGroups, spec: TensorSpec, block_elements: int, compressor: Compressor) -> tuple[int, ...]:
    """Return the cuts of a tensor's shards, between two blocks of what is sent between nodes and of that within them.

    Ranks of larger nodes that own no shard still send and receive.
    """
    assert group.intra_node is not None
    cuts = spec.even_cuts(group.num_shards, math.lcm(block_elements, compressor.block_elements))
    return cuts + (spec.num_elements,) * (group.intra_node.size - group.num_shards)


def sum_of_shard(chunks: RankChunks) -> torch.Tensor:
    """Return memory for the sum of the local shard's copies, in the dtype of sums."""
    dtype = sum_dtype(chunks.layout.dtype)
    num_bytes = (chunks.own.stop - chunks.own.start) * dtype.itemsize
    return typed(chunks.communicator.scratch("sum", num_bytes, chunks.device), dtype)
