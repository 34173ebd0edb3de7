"""How ranks that average at their own paces agree on when to stop."""

from dataclasses import dataclass
from typing import Literal, get_args

from torchbagua.collectives.agreement import all_reduce_max
from torchbagua.runtime.changed_layout import LayoutWatch
from torchbagua.runtime.load_record import different_loads
from torchbagua.transport.communicator import Communicator
from torchbagua.transport.errors import CommunicationError

Reason = Literal["abort", "detach", "new buckets", "load_state_dict", "averaged_weights"]
"""Why a rank stops; all must have the same reason."""

_REASONS: tuple[Reason, ...] = get_args(Reason)
_GIVES_UP = 2  # more than a wish for the mean, so that it is in the largest number of all ranks


@dataclass(frozen=True)
class Vote:
    """What a rank says before a round.

    Attributes:
        leaves: it ends the rounds of all ranks, at once.
        stops: its weights have stopped changing; when those of all ranks have, the rounds end.
        wants_mean: it wants one last mean then.
        reason: why it stops; of no meaning where it does not.
        num_loads: loads of weights that its snapshot is from after.
        gives_up: it has waited too long for ranks that have seen another number of loads.
    """

    leaves: bool = False
    stops: bool = False
    wants_mean: bool = False
    reason: Reason = _REASONS[0]
    num_loads: int = 0
    gives_up: bool = False


@dataclass(frozen=True)
class Outcome:
    """What the votes of all ranks come to; at last, how the rounds have ended.

    Attributes:
        leaving_rank: a rank that leaves; None where none does.
        running_rank: a rank that has not stopped; None where all have.
        has_mean: whether a rank wants a last mean, which then all of them hold in their buckets.
        num_loads: loads of weights that the snapshots of all ranks are from after; None if these numbers differ, and
            the snapshots must not be averaged.
    """

    leaving_rank: int | None
    running_rank: int | None
    has_mean: bool
    num_loads: int | None = 0


def count_votes(communicator: Communicator, vote: Vote, watch: LayoutWatch, purpose: str) -> Outcome:
    """Tell all ranks this rank's vote, and return what all come to, the same on all. Collective.

    Args:
        communicator: whose ranks vote.
        vote: this rank's.
        watch: what it has found is told with the vote.
        purpose: what for, in events and errors.

    Raises:
        RuntimeError: `watch` has found another memory layout on a rank.
        CommunicationError: ranks stop for different reasons; or have loaded weights a different number of times when
            all stop, or one gives up. Or communication failed.
    """
    size, own = communicator.size, communicator.rank + 1
    wishes = int(vote.wants_mean) + (_GIVES_UP if vote.gives_up else 0)
    message = watch.message(communicator.rank, size)  # an even number
    # Reasons are of interest only if the numbers of loads are the same.
    loads = (vote.num_loads * len(_REASONS) + _REASONS.index(vote.reason)) * size + communicator.rank
    values = [own if vote.leaves else 0, 0 if vote.stops else own, message * _GIVES_UP + wishes, loads, -loads]
    leaving_rank, running_rank, largest, most, fewest = all_reduce_max(communicator, values, purpose)
    message, wishes = divmod(largest, 2 * _GIVES_UP)
    watch.check(2 * message, size)
    fewest_loads, first_reason, behind = _unpacked(-fewest, size)
    most_loads, last_reason, ahead = _unpacked(most, size)
    ends = not leaving_rank and not running_rank
    if fewest_loads != most_loads and not leaving_rank and (ends or wishes >= _GIVES_UP):
        seen = sorted({communicator.ranks[behind]: fewest_loads, communicator.ranks[ahead]: most_loads}.items())
        (first, first_number), (second, second_number) = seen
        raise different_loads((first, second), (first_number, second_number))
    if ends and first_reason != last_reason:
        reasons = f"{_REASONS[first_reason]} and {_REASONS[last_reason]}"
        raise CommunicationError(f"torchbagua: ranks have stopped averaging for different reasons: {reasons}")
    return Outcome(
        leaving_rank - 1 if leaving_rank else None,
        running_rank - 1 if running_rank else None,
        ends and bool(wishes % _GIVES_UP),
        most_loads if fewest_loads == most_loads else None,
    )


def _unpacked(packed: int, size: int) -> tuple[int, int, int]:
    """Return a number of loads, the index of a reason, and a rank."""
    rest, rank = divmod(packed, size)
    return *divmod(rest, len(_REASONS)), rank
