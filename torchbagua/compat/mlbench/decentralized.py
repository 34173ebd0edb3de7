"""mlbench's DecentralizedAggregation: the mean with a rank's neighbors."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchbagua import BaguaProcessGroup
from torchbagua.compat.mlbench.base import Aggregation, Denominator
from torchbagua.compat.mlbench.centralized import AVG_WORLD, check_op
from torchbagua.extend import BaguaBucket, BaguaTensor, Topology
from torchbagua.observe import Observer


@dataclass(frozen=True)
class Neighbours(Topology):
    """A graph given by its mixing matrix. Columns need not sum to 1: in mlbench, each rank divides by its own count.

    Attributes:
        matrix: one row per rank, the weights of its mean.
    """

    matrix: tuple[tuple[float, ...], ...]

    def neighbours(self, rank: int, size: int, round: int) -> Mapping[int, float]:
        return {peer: weight for peer, weight in enumerate(self.matrix[rank]) if weight}

    def check(self, owner: str, size: int, members: str = "ranks") -> None:
        """Do nothing: the aggregation has checked the matrix."""


class DecentralizedAggregation(Aggregation):
    """The mean of this rank's and its neighbors' values, in full precision.

    The op is "avg_world"; `denom` has no effect. Neighbors are mutual: each must list the other. Ranks may have
    different numbers of neighbors; the mean over all ranks then changes, unless `weights` preserve it.

    Args:
        rank: this rank.
        neighbors: the other ranks to average with, each once.
        use_cuda: no effect, see `Aggregation`.
        weights: the weight of each neighbor's values, by its rank. This rank's weight may be given too; by default it
            makes the sum 1. By default all weights are equal.
        process_group: see `Aggregation`.
        observers: see `Aggregation`.

    Raises:
        ValueError: `neighbors` contains this rank, or a rank twice, or `weights` are invalid. At the first call, on all
            ranks: `rank` is not this rank's number in the group, a neighbor does not exist, or a neighbor does not
            list this rank.
        NotImplementedError: at each call, before anything is sent: the op does not exist.
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
        if any(not isinstance(number, int) or number < 0 for number in [rank, *neighbors]):
            raise ValueError(f"{self._owner}: rank and neighbors must be ranks, got {rank!r} and {neighbors!r}")
        if rank in neighbors:
            raise ValueError(f"{self._owner}: neighbors must be other ranks than rank={rank}, got {neighbors}")
        if len(set(neighbors)) < len(neighbors):
            raise ValueError(
                f"{self._owner}: neighbors must list each rank once, got {neighbors}. On a ring of two, the ranks "
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
        for operation in bucket.operations:  # `BaguaBucket.run` would report a bucket, as the caller already does
            operation.run(bucket)
        return bucket.flat

    def _check_op(self, op: str) -> None:
        check_op(self._owner, "Decentralized aggregation", op, [AVG_WORLD])

    def _check_group(self, group: BaguaProcessGroup) -> None:
        problem = None
        if self.rank != group.rank:
            problem = f"rank must be {group.rank}, this rank's number in the group, got {self.rank}"
        elif unknown := [peer for peer in self.neighbors if peer >= group.size]:
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
                    f"{self._owner}: the rank or the neighbors of rank {rank} are invalid for {group.size} ranks"
                )
        for rank, weights in enumerate(rows):
            for peer, weight in enumerate(weights):
                if weight and not rows[peer][rank]:
                    raise ValueError(
                        f"{self._owner}: rank {rank} lists {peer} as a neighbor, but rank {peer} does not list {rank}"
                    )
        self._topology = Neighbours(tuple(tuple(weights) for weights in rows))


def _with_own(owner: str, rank: int, neighbors: Sequence[int], weights: Mapping[int, float] | None) -> dict[int, float]:
    if weights is None:
        return dict.fromkeys([rank, *neighbors], 1 / (len(neighbors) + 1))
    if set(weights) - {rank} != set(neighbors):
        raise ValueError(f"{owner}: weights must be given for the neighbors {list(neighbors)}, got {sorted(weights)}")
    every = {rank: 1 - math.fsum(weights.values()), **weights}
    if not math.isclose(math.fsum(every.values()), 1, abs_tol=1e-6) or min(every.values()) <= 0:
        raise ValueError(
            f"{owner}: weights must be positive and sum to 1, including the weight of rank {rank} itself, got {every}"
        )
    return every
