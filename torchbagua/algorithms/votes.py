"""How ranks that average at their own paces agree on when to stop."""

from dataclasses import dataclass
from typing import Literal, get_args

from torchbagua.changed_layout import LayoutWatch
from torchbagua.collectives import CommunicationError, Communicator, all_reduce_max

Reason = Literal["abort", "detach", "new buckets", "load_state_dict", "averaged_weights"]
"""Why a rank stops; all must have the same reason."""

_REASONS: tuple[Reason, ...] = get_args(Reason)


@dataclass(frozen=True)
class Vote:
    """What a rank says before a round.

    Attributes:
        leaves: it ends the rounds of all ranks, at once.
        stops: its weights have stopped changing; when those of all ranks have, the rounds end.
        wants_mean: it wants one last mean then.
        reason: why it stops; of no meaning where it does not.
    """

    leaves: bool = False
    stops: bool = False
    wants_mean: bool = False
    reason: Reason = _REASONS[0]


@dataclass(frozen=True)
class Outcome:
    """What the votes of all ranks come to; at last, how the rounds have ended.

    Attributes:
        leaving_rank: a rank that leaves; None where none does.
        running_rank: a rank that has not stopped; None where all have.
        has_mean: whether a rank wants a last mean, which then all of them hold in their buckets.
    """

    leaving_rank: int | None
    running_rank: int | None
    has_mean: bool


def count_votes(communicator: Communicator, vote: Vote, watch: LayoutWatch, purpose: str) -> Outcome:
    """Tell all ranks this rank's vote, and return what all come to, the same on all. Collective.

    Args:
        communicator: whose ranks vote.
        vote: this rank's.
        watch: what it has found is told with the vote.
        purpose: what for, in events and errors.

    Raises:
        RuntimeError: `watch` has found another memory layout on a rank.
        CommunicationError: ranks stop for different reasons, or communication failed.
    """
    own, reason = communicator.rank + 1, _REASONS.index(vote.reason)
    wish = watch.message(communicator.rank, communicator.size, flag=vote.wants_mean)
    values = [own if vote.leaves else 0, 0 if vote.stops else own, wish, reason, -reason]
    leaving_rank, running_rank, largest_wish, last, minus_first = all_reduce_max(communicator, values, purpose)
    watch.check(largest_wish, communicator.size)
    wants_mean = watch.has_flag(largest_wish)
    ends = not leaving_rank and not running_rank
    if ends and last != -minus_first:
        reasons = f"{_REASONS[-minus_first]} and {_REASONS[last]}"
        raise CommunicationError(f"torchbagua: ranks have stopped averaging for different reasons: {reasons}")
    return Outcome(
        leaving_rank - 1 if leaving_rank else None,
        running_rank - 1 if running_rank else None,
        ends and wants_mean,
    )
