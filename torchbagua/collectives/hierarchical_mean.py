"""The mean over nodes in two pieces: links between nodes carry one while ranks of a node exchange the other.

Shape suffixes: N elements, L elements of a shard.
"""

import itertools
import math
from collections.abc import Callable
from typing import Protocol

import torch

from torchbagua.codecs.base import Compressor, sum_dtype
from torchbagua.codecs.blocks import TensorSpec
from torchbagua.collectives.all_gather import AllGather
from torchbagua.collectives.exchange import Stage, run_stages
from torchbagua.collectives.first_runs import FirstRuns
from torchbagua.collectives.hierarchical import shard_cuts, sum_of_shard
from torchbagua.collectives.nodes import NodeGroups
from torchbagua.collectives.rank_chunks import Piece, RankChunks
from torchbagua.collectives.reduce_scatter import ReduceScatter, Rows
from torchbagua.collectives.two_phase_mean import TwoPhaseMean, is_long

_NUM_PIECES = 2


class _Mean(Protocol):
    def __call__(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> None: ...


class HierarchicalMean:
    """What `Hierarchical` with the two-phase mean between nodes gives, to the bit, without residuals and between CPUs.

    Shards are sent in two pieces, unless the first runs were fast on all ranks.

    Args:
        group: with several nodes, of which one has several ranks.
        compressor: of what is sent between nodes.
        spec: the tensor; see `is_worthwhile`.
        divisor: of the sum.
        intra_compressor: of what is sent within nodes.
        make_whole: makes what gives the same without pieces.
    """

    def __init__(
        self,
        group: NodeGroups,
        compressor: Compressor,
        spec: TensorSpec,
        divisor: float,
        intra_compressor: Compressor,
        make_whole: Callable[[], _Mean],
    ) -> None:
        assert group.intra_node is not None
        self._make_whole = make_whole
        self._whole: _Mean | None = None
        cuts = _piece_cuts(group, compressor, spec, intra_compressor)
        self._chunks = chunks = RankChunks(group.intra_node, intra_compressor, spec, cuts)
        self._scatter = ReduceScatter(chunks)
        self._gather = AllGather(chunks)
        self._means = []
        if group.inter_node is not None:
            for piece in chunks.pieces:
                part = spec.restricted_to(piece.elements[chunks.rank], sum_dtype(spec.dtype))
                self._means.append(TwoPhaseMean(group.inter_node, compressor, part, divisor, part=piece.index))
        size = max(2, group.intra_node.size)  # a rank alone on its node is not slow because it sends nothing there
        self._first_runs = FirstRuns(group.world, 2 * (size - 1) / size * chunks.layout.num_bytes, spec.name)

    @staticmethod
    def is_worthwhile(
        group: NodeGroups, compressor: Compressor, spec: TensorSpec, intra_compressor: Compressor
    ) -> bool:
        """Return whether pieces are long messages still, and none is empty, the same on all ranks."""
        cuts = shard_cuts(group, spec, compressor.block_elements, intra_compressor)
        posts_messages = group.world.posts_messages(spec.device)
        if not (posts_messages and compressor.codes_blocks_alone and is_long(intra_compressor, spec, cuts)):
            return False
        pieces = _piece_cuts(group, compressor, spec, intra_compressor)[: group.num_shards * _NUM_PIECES + 1]
        return all(start < stop for start, stop in itertools.pairwise(pieces))

    def __call__(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> None:
        """Write the mean of `x_N` over the ranks to `out_N`, another tensor like it; by default in place.

        Raises:
            CommunicationError: a peer is gone or did not take part within the group's timeout.
        """
        if self._whole is None and self._first_runs.were_fast():
            self._whole = self._make_whole()
        if self._whole is not None:
            self._whole(x_N, out_N)
        else:
            self._first_runs.run(lambda: run_stages(self._stages(x_N, x_N if out_N is None else out_N)))

    def _stages(self, x_N: torch.Tensor, out_N: torch.Tensor) -> list[Stage]:
        chunks = self._chunks
        sum_L = sum_of_shard(chunks)

        def add_up(piece: Piece, rows: Rows) -> None:
            self._scatter.decode_mean(piece, rows, sum_L[piece.within_own])

        gathering = self._gather.begin(out_N)
        scatters = self._scatter.begin(x_N).stages(add_up)
        means = [
            mean.stages(sum_L[piece.within_own], sum_L[piece.within_own])
            for mean, piece in zip(self._means, chunks.pieces, strict=False)
        ]
        between: list[Stage] = []
        ends = [stage.exchange for stage in scatters]
        if means:
            between = [first._replace(after=stage.exchange) for (first, _), stage in zip(means, scatters, strict=True)]
            between += [last for _, last in means]
            ends = [last.exchange for _, last in means]
        gathers = gathering.stages(ends, sum_L)
        return [*scatters, *between, *gathers]


def _piece_cuts(
    group: NodeGroups, compressor: Compressor, spec: TensorSpec, intra_compressor: Compressor
) -> tuple[int, ...]:
    cuts = shard_cuts(group, spec, compressor.block_elements, intra_compressor)
    return spec.cuts_within(cuts, _NUM_PIECES, math.lcm(compressor.block_elements, intra_compressor.block_elements))
