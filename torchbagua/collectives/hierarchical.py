"""Hierarchical collectives: sums within nodes, and any collective between nodes.

Shape suffixes: N elements, R ranks, L elements of a shard, W wire bytes.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchbagua.codecs.base import Compressor, sum_dtype
from torchbagua.codecs.blocks import TensorSpec
from torchbagua.codecs.cast import Identity, typed
from torchbagua.collectives.all_gather import AllGather
from torchbagua.collectives.exchange import Pipeline
from torchbagua.collectives.nodes import NodeGroups
from torchbagua.collectives.rank_chunks import RankChunks
from torchbagua.collectives.reduce_scatter import ReduceScatter


class Hierarchical:
    """The two intra-node parts of a hierarchical collective. The caller runs any collective between nodes in between.

        with hierarchical.sum_of_shard(x_N) as sum_L:
            if hierarchical.owners is not None:
                collective(sum_L)

    The tensor has S shards. S is the smallest number of ranks on a node, so that all network cards work:
    1. Reduce-scatter within the node: rank s < S gets the sum of shard s, in float32 or float64.
    2. In the caller's block, the owners of the same shard on all nodes replace the sum by the result.
    3. All-gather within the node: the owners send the results, in the tensor's dtype, to all ranks of the node.

    Parts 1 and 3 may be compressed, too. The results are still bitwise equal on all ranks of all nodes if the
    collective of part 2 gives bitwise equal results to all owners of a shard.

    Args:
        group: a group with several nodes, at least one of which has several ranks.
        spec: the tensor.
        block_elements: the number of elements in a block; shards consist of whole blocks.
        compressor: the codec within nodes. It must encode the tensor's dtype.
        ranks_agree: the ranks of a node have equal tensors, so in part 1 each rank copies its shard and nothing is
            summed.

    Attributes:
        owners: the ranks that own the same shard, one on each node; None on a rank that owns no shard.
        shard: the elements of the shard that this rank owns.
        shard_spec: the description of the shard's sum.
    """

    def __init__(
        self,
        group: NodeGroups,
        spec: TensorSpec,
        block_elements: int,
        compressor: Compressor = Identity(),  # noqa: B008  # it is frozen
        *,
        ranks_agree: bool = False,
    ) -> None:
        assert group.intra_node is not None
        cuts = shard_cuts(group, spec, block_elements, compressor)
        self._chunks = RankChunks(group.intra_node, compressor, spec, cuts)
        self._ranks_agree = ranks_agree
        self.owners = group.inter_node
        self.shard = self._chunks.own
        self.shard_spec = spec.restricted_to(self.shard, sum_dtype(spec.dtype))

    @contextmanager
    def sum_of_shard(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> Iterator[torch.Tensor]:
        """Yield the node's sum of the local shard, [L]; then write the results that the owners left there to `out_N`.

        Args:
            x_N: the tensor.
            out_N: another tensor like it, for the result; by default in place.

        Raises:
            CommunicationError: a peer disconnected or did not take part within the group's timeout.
        """
        chunks, pipeline = self._chunks, Pipeline(self._chunks.communicator, x_N.device)
        (piece,) = chunks.pieces
        sum_L = memory_of_sum(chunks)
        # Construct it now, so that its receives are posted early.
        gather = AllGather(chunks, x_N if out_N is None else out_N, pipeline)
        if self._ranks_agree:
            sum_L.copy_(x_N[chunks.own])
        else:
            scatter = ReduceScatter(chunks, x_N, pipeline)
            scatter.send(piece)
            scatter.receive_mean(piece, sum_L)
            pipeline.wait_for_sends()
        yield sum_L
        gather.send(piece, sum_L)
        gather.receive(piece)
        pipeline.wait_for_sends()


def shard_cuts(group: NodeGroups, spec: TensorSpec, block_elements: int, compressor: Compressor) -> tuple[int, ...]:
    """Return the cuts of a tensor's shards, at block boundaries of both codecs, between nodes and within nodes.

    Ranks of larger nodes that own no shard still send and receive.
    """
    assert group.intra_node is not None
    cuts = spec.even_cuts(group.num_shards, math.lcm(block_elements, compressor.block_elements))
    return cuts + (spec.num_elements,) * (group.intra_node.size - group.num_shards)


def memory_of_sum(chunks: RankChunks) -> torch.Tensor:
    """Return scratch memory for the sum of the local shard's copies, in the dtype of sums."""
    dtype = sum_dtype(chunks.layout.dtype)
    num_bytes = (chunks.own.stop - chunks.own.start) * dtype.itemsize
    return typed(chunks.communicator.scratch("sum", num_bytes, chunks.device), dtype)
