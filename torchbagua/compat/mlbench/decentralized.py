"""mlbench's DecentralizedAggregation: the mean with some other ranks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchbagua import BaguaBucket, BaguaProcessGroup, BaguaTensor, Observer, Topology
from torchbagua.compat.mlbench.base import Aggregation, Denominator
from torchbagua.compat.mlbench.centralized import AVG_WORLD, check_op


@dataclass(frozen=True)
class Neighbours(Topology):
    """A graph by its mixing matrix. Columns need not add up to 1: mlbench divides by each rank's own number.

    Attributes:
        matrix: for each rank, the weights of its mean.
    """

    matrix: tuple[tuple[float, ...], ...]

    def neighbours(self, rank: int, size: int, round: int) -> Mapping[int, float]:
        return {peer: weight for peer, weight in enumerate(self.matrix[rank]) if weight}

    def check(self, owner: str, size: int, members: str = "ranks") -> None:
        """Nothing: the aggregation has checked the matrix."""


class DecentralizedAggregation(Aggregation):
    """The mean of this rank and its neighbours: the sum of all their values, divided by their number. Full precision.

    The op is "avg_world"; `denom` is without effect. Neighbours are mutual: if a rank has another one, that one has it.
    Ranks may have different numbers of neighbours; the mean over all ranks then changes, unless `weights` keep it.

    Args:
        rank: this rank.
        neighbors: the other ranks that it averages with, each once.
        use_cuda: without effect, see `Aggregation`.
        weights: the weight of each neighbour's values, by its rank. This rank's own weight is what is missing from 1,
            and may be given too. By default all weights are equal.
        process_group: see `Aggregation`.
        observers: see `Aggregation`.

    Raises:
        ValueError: `neighbors` has this rank itself, or a rank twice, or `weights` do not fit. At the first call, on
            all ranks: `rank` is not that of the group, there is no such neighbour, or a neighbour does not have this
            rank for one.
        NotImplementedError: at each call, before anything is sent: there is no such op.
    """

    def __init__(
        self,
        rank: int,
        neighbors: Sequence[int],
        use_cuda: bool = False,
        *,
        weights: Mapping[int, float] | None = None,
        process_group: dist.ProcessGroup | BaguaProcessGroup | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        super().__init__(use_cuda, process_group=process_group, observers=observers)
        neighbors = list(neighbors)
        if any(not isinstance(one, int) or one < 0 for one in [rank, *neighbors]):
            raise ValueError(f"{self._owner}: rank and neighbors must be ranks, got {rank!r} and {neighbors!r}")
        if rank in neighbors:
            raise ValueError(f"{self._owner}: neighbors must be other ranks than rank={rank}, got {neighbors}")
        if len(set(neighbors)) < len(neighbors):
            raise ValueError(
                f"{self._owner}: neighbors must name each rank once, got {neighbors}. On a ring of two, the ranks "
                "before and after rank 0 are both rank 1: neighbors=[1]"
            )
        self.rank = rank
        self.neighbors = neighbors
        self.weights = _with_own(self._owner, rank, neighbors, weights)
        self._topology: Neighbours | None = None
        self._buckets: dict[tuple[object, ...], BaguaBucket] = {}

    def _agg(self, data: torch.Tensor, op: str, denom: Denominator = None) -> torch.Tensor:
        group = self.group
        if not self.neighbors:
            return data
        assert self._topology is not None
        key = (self._name, data.numel(), data.dtype, data.device)
        if key not in self._buckets:
            like = BaguaTensor(self._name, torch.empty(data.numel(), dtype=data.dtype, device="meta"))
            bucket = BaguaBucket(self._name, [like], group, torch.empty_like(data.view(-1)))
            self._buckets[key] = bucket.append_decentralized_synchronous_op(bucket.flat, False, self._topology)
        bucket = self._buckets[key]
        bucket.flat.copy_(data.view(-1))
        for operation in bucket.operations:  # `BaguaBucket.run` would tell observers of a bucket, as the caller does
            operation.run(bucket)
        return bucket.flat

    def _check_op(self, op: str) -> None:
        check_op(self._owner, "Decentralized aggregation", op, [AVG_WORLD])

    def _check_group(self, group: BaguaProcessGroup) -> None:
        problem = None
        if self.rank != group.rank:
            problem = f"rank must be {group.rank}, that of the group, got {self.rank}"
        elif unknown := [one for one in self.neighbors if one >= group.size]:
            problem = f"neighbors must be ranks below {group.size}, got {unknown}"
        row = torch.full((group.size,), math.nan, dtype=torch.float64)
        if problem is None:
            row = torch.tensor([self.weights.get(peer, 0.0) for peer in range(group.size)], dtype=torch.float64)
        rows = group.all_gather(row, name=self._owner).tolist()
        if problem is not None:
            raise ValueError(f"{self._owner}: {problem}")
        for rank, weights in enumerate(rows):
            if math.isnan(weights[0]):
                raise ValueError(
                    f"{self._owner}: the rank or the neighbors of rank {rank} do not fit {group.size} ranks"
                )
        for rank, weights in enumerate(rows):
            for peer, weight in enumerate(weights):
                if weight and not rows[peer][rank]:
                    raise ValueError(
                        f"{self._owner}: rank {rank} has {peer} for a neighbour, which does not have it for one"
                    )
        self._topology = Neighbours(tuple(tuple(weights) for weights in rows))


def _with_own(owner: str, rank: int, neighbors: Sequence[int], weights: Mapping[int, float] | None) -> dict[int, float]:
    if weights is None:
        return dict.fromkeys([rank, *neighbors], 1 / (len(neighbors) + 1))
    if set(weights) - {rank} != set(neighbors):
        raise ValueError(f"{owner}: weights must be of the neighbors {list(neighbors)}, got those of {sorted(weights)}")
    every = {rank: 1 - math.fsum(weights.values()), **weights}
    if not math.isclose(math.fsum(every.values()), 1, abs_tol=1e-6) or min(every.values()) <= 0:
        raise ValueError(
            f"{owner}: weights must be positive, and add up to 1 with that of rank {rank} itself, got {every}"
        )
    return every
