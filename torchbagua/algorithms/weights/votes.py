"""Votes by which ranks that average asynchronously agree on when to stop."""

from dataclasses import dataclass, replace
from typing import Literal

from torchbagua.collectives.agreement import agree, name_ranks, ranks_by_value
from torchbagua.runtime.lockstep import require_same_numbers
from torchbagua.runtime.parameters import LayoutWatch
from torchbagua.transport.communicator import Communicator
from torchbagua.transport.errors import CommunicationError

Reason = Literal["abort", "detach", "new buckets", "load_state_dict", "averaged_weights"]
"""Why a rank stops. All ranks must have the same reason."""


@dataclass(frozen=True)
class Vote:
    """The vote of a rank before a round.

    Attributes:
        leaves: whether the rank leaves, which ends the rounds of all ranks at once.
        stops: whether the rank's weights have stopped changing. When all ranks have stopped, the rounds end.
        wants_mean: whether the rank requests a last mean then.
        reason: why the rank stops. It has no meaning if the rank does not stop.
        num_loads: the number of loads of weights before the rank's snapshot.
        gives_up: whether the rank has waited too long for ranks that have seen another number of loads.
        changed_parameter: see `LayoutWatch`; `count_votes` sets it.
    """

    leaves: bool = False
    stops: bool = False
    wants_mean: bool = False
    reason: Reason = "abort"
    num_loads: int = 0
    gives_up: bool = False
    changed_parameter: int = 0


@dataclass(frozen=True)
class Outcome:
    """The combined result of the votes of all ranks. The last outcome describes how the rounds ended.

    Attributes:
        leaving_rank: a rank that leaves, or None.
        running_rank: a rank that has not stopped, or None if all ranks have stopped.
        has_mean: whether any rank requests a last mean, which all ranks then have in their buckets.
        num_loads: the number of loads of weights before the snapshots of all ranks. None if the numbers differ, in
            which case the snapshots must not be averaged.
    """

    leaving_rank: int | None
    running_rank: int | None
    has_mean: bool
    num_loads: int | None = 0


def count_votes(communicator: Communicator, vote: Vote, watch: LayoutWatch, purpose: str) -> Outcome:
    """Exchange votes with all ranks, and return the outcome, which is identical on all ranks. Collective."""
    votes = agree(communicator, replace(vote, changed_parameter=watch.changed_parameter), purpose)
    watch.check([vote.changed_parameter for vote in votes])
    leaving_rank = max((rank for rank, vote in enumerate(votes) if vote.leaves), default=None)
    running_rank = max((rank for rank, vote in enumerate(votes) if not vote.stops), default=None)
    ends = leaving_rank is None and running_rank is None
    num_loads = [vote.num_loads for vote in votes]
    if leaving_rank is None and (ends or any(vote.gives_up for vote in votes)):
        require_same_numbers(communicator, num_loads)
    reasons = ranks_by_value([vote.reason for vote in votes], communicator.ranks)
    if ends and len(reasons) > 1:
        seen = ", ".join(f"{name_ranks(ranks)} for {reason}" for reason, ranks in reasons)
        raise CommunicationError(f"torchbagua: ranks have stopped averaging for different reasons: {seen}")
    return Outcome(
        leaving_rank,
        running_rank,
        has_mean=ends and any(vote.wants_mean for vote in votes),
        num_loads=num_loads[0] if len(set(num_loads)) == 1 else None,
    )
