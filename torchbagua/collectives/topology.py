"""Topologies: who averages with whom, with which weights, in which round."""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torchbagua.collectives.agreement import qualified_name

# Weights are used in float32 or float64, and a user may have rounded them to a few decimals.
_TOLERANCE = 1e-6


class Topology:
    """The peers that average with each other in each round, the same on all ranks. Subclasses are frozen dataclasses.

    In each round the tensor of rank r becomes the sum over j of W_rj x_j, where W is a mixing matrix (Lian et al.,
    arXiv 1705.09056). `neighbours` returns row r of W. If nodes average instead of ranks, the numbers are node numbers.
    To build a topology from a function, use `Graph`.
    """

    def period(self, size: int) -> int:
        """Return the number of rounds after which the topology repeats, for `size` ranks."""
        return 1

    def neighbours(self, rank: int, size: int, round: int) -> Mapping[int, float]:
        """Return the weights of the mean that `rank` computes, by rank, including its own weight.

        It is called for all ranks and for rounds from 0 to `period(size)` - 1, and returns the same weights on all
        ranks.
        """
        raise TypeError(f"{type(self).__name__} must override Topology.neighbours")

    def check(self, owner: str, size: int, members: str = "ranks") -> None:
        """Raise ValueError if the topology does not fit `size` ranks, in any round of its period.

        Neighbors must be mutual, since both send. Weights must be positive. Rows and columns of the mixing matrix must
        sum to 1, so that averaging does not change the mean over all ranks.

        Args:
            owner: the subject of the error, which also names topology, round and rank.
            size: the number of ranks.
            members: what the error calls the members: "ranks", or "nodes".
        """
        period = self.period(size)
        if not isinstance(period, int) or period < 1:
            raise ValueError(f"{owner}: the period of {self!r} must be a positive integer, got {period!r}")
        for round in range(period):
            rows = [self.neighbours(rank, size, round) for rank in range(size)]
            member = members.removesuffix("s")
            subjects = [f"{owner}: {self!r} in round {round}: {member} {rank} of {size}" for rank in range(size)]
            for subject, row in zip(subjects, rows, strict=True):
                _check_row(subject, row, size)
            for rank, (subject, row) in enumerate(zip(subjects, rows, strict=True)):
                if one_sided := [peer for peer in row if rank not in rows[peer]]:
                    raise ValueError(f"{subject} has neighbor {one_sided[0]}, which does not have it as a neighbor")
                _check_sum(f"{subject}: the weights given to it", [rows[peer][rank] for peer in row])


def _has_neighbours_of(topology_class: type[Topology], topology: Topology) -> bool:
    """Return whether no subclass overrides the neighbors of `topology_class`."""
    cls = type(topology)
    return cls.neighbours is topology_class.neighbours and cls.period is topology_class.period


def _check_row(subject: str, row: object, size: int) -> None:
    if not isinstance(row, Mapping) or not all(isinstance(peer, int) for peer in row):
        raise ValueError(f"{subject} must map its neighbors to weights in a dict, got {row!r}")
    for peer, weight in row.items():
        if not 0 <= peer < size:
            raise ValueError(f"{subject} has neighbor {peer}, which does not exist")
        if not isinstance(weight, float | int) or not 0 < weight < math.inf:
            raise ValueError(f"{subject} must have positive weights, got {weight!r} for {peer}")
    _check_sum(f"{subject}: its weights", list(row.values()))


def _check_sum(subject: str, weights: list[float]) -> None:
    if not math.isclose(math.fsum(weights), 1, abs_tol=_TOLERANCE):
        raise ValueError(f"{subject} must sum to 1, got {math.fsum(weights):g}")


@dataclass(frozen=True)
class AllRanks(Topology):
    """All ranks average together, in every round."""

    def neighbours(self, rank: int, size: int, round: int) -> Mapping[int, float]:
        return dict.fromkeys(range(size), 1 / size)

    def check(self, owner: str, size: int, members: str = "ranks") -> None:
        if not _has_neighbours_of(AllRanks, self):  # else it fits any size; checking all neighbors takes size^2 steps
            super().check(owner, size, members)


@dataclass(frozen=True)
class ShiftOne(Topology):
    """Ranks average in pairs, which change in each round. The number of ranks must be even.

    Ranks of the lower half are paired with ranks of the upper half, and each such pair occurs once in size / 2 rounds.
    Source: Bagua (arXiv 2107.01499), DecentralizedAlgorithm.
    """

    def period(self, size: int) -> int:
        return size // 2

    def neighbours(self, rank: int, size: int, round: int) -> Mapping[int, float]:
        half = size // 2
        peer = (round + rank) % half + half if rank < half else (rank - half - round) % half
        return {rank: 0.5, peer: 0.5}

    def check(self, owner: str, size: int, members: str = "ranks") -> None:
        if size % 2:
            raise ValueError(f"{owner}: {self!r} ('shift_one') pairs {members} and needs an even number, got {size}")
        if not _has_neighbours_of(ShiftOne, self):  # else it fits any even size
            super().check(owner, size, members)


@dataclass(frozen=True)
class Ring(Topology):
    """Every rank averages with the rank before it and the rank after it, with weights of 1/3.

    With two ranks, the other rank counts twice.
    """

    def neighbours(self, rank: int, size: int, round: int) -> Mapping[int, float]:
        weights: dict[int, float] = {}
        for peer in (rank, (rank - 1) % size, (rank + 1) % size):
            weights[peer] = weights.get(peer, 0) + 1 / 3
        return weights

    def check(self, owner: str, size: int, members: str = "ranks") -> None:
        if not _has_neighbours_of(Ring, self):  # else it fits any size
            super().check(owner, size, members)


@dataclass(frozen=True, repr=False)
class Graph(Topology):
    """Any graph, given by a function.

    Args:
        function: takes (rank, size, round) and returns the result of `Topology.neighbours`. Ranks compare the function
            by its module and name, so define it at the top level of a module.
        num_rounds: the number of rounds after which the graph repeats, or a function that returns it for a number of
            ranks.

    Raises:
        TypeError: a function has no such name; for example, it is a lambda.
    """

    function: Callable[[int, int, int], Mapping[int, float]]
    num_rounds: int | Callable[[int], int] = 1

    def __post_init__(self) -> None:
        repr(self)  # raises if a function has no name

    def __repr__(self) -> str:
        period = qualified_name(self.num_rounds, "Graph: num_rounds") if callable(self.num_rounds) else self.num_rounds
        return f"Graph({qualified_name(self.function, 'Graph: function')}, {period})"

    def period(self, size: int) -> int:
        return self.num_rounds(size) if callable(self.num_rounds) else self.num_rounds

    def neighbours(self, rank: int, size: int, round: int) -> Mapping[int, float]:
        return self.function(rank, size, round)


PEER_SELECTION_MODES = {"all": AllRanks(), "shift_one": ShiftOne()}
"""Bagua's names for topologies."""


def topology_of(owner: str, peer_selection_mode: str | Topology) -> Topology:
    """Return the topology with this name, or the given topology; else raise ValueError with `owner` as its subject."""
    if isinstance(peer_selection_mode, Topology):
        return peer_selection_mode
    if not isinstance(peer_selection_mode, str) or peer_selection_mode not in PEER_SELECTION_MODES:
        raise ValueError(
            f"{owner}: peer_selection_mode must be one of {tuple(PEER_SELECTION_MODES)}, got {peer_selection_mode!r}; "
            "pass a Topology for another graph"
        )
    return PEER_SELECTION_MODES[peer_selection_mode]


def peers_in_order(topology: Topology, rank: int, size: int, round: int) -> list[int]:
    """Return the peers of `rank` in the order of its exchanges, which keeps ranks from waiting long for each other.

    Every exchange of the round has a number; those of one rank differ, and are small if possible. All ranks run their
    exchanges in the order of these numbers, so ranks never wait for each other in a cycle.
    """
    own_peers = [peer for peer in topology.neighbours(rank, size, round) if peer != rank]
    if len(own_peers) == 1:
        return own_peers
    numbered: list[dict[int, int]] = [{} for _ in range(size)]  # for each rank, its peer in each exchange
    for lower in range(size):
        for upper in sorted(topology.neighbours(lower, size, round)):
            if upper > lower:
                taken = numbered[lower].keys() | numbered[upper].keys()
                number = next(number for number in itertools.count() if number not in taken)
                numbered[lower][number], numbered[upper][number] = upper, lower
    return [peer for _, peer in sorted(numbered[rank].items())]
