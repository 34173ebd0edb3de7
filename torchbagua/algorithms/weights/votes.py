"""Votes by which ranks that average asynchronously agree on when to stop."""

from dataclasses import dataclass
from typing import Literal, get_args

from torchbagua.collectives.agreement import all_reduce_max
from torchbagua.runtime.changed_layout import LayoutWatch
from torchbagua.runtime.load_record import different_loads
from torchbagua.transport.communicator import Communicator
from torchbagua.transport.errors import CommunicationError

Reason = Literal["abort", "detach", "new buckets", "load_state_dict", "averaged_weights"]
"""Why a rank stops. All ranks must have the same reason."""

_REASONS: tuple[Reason, ...] = get_args(Reason)
_GIVES_UP = 2  # more than a request for the mean, so that the maximum over ranks includes it


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
    """

    leaves: bool = False
    stops: bool = False
    wants_mean: bool = False
    reason: Reason = _REASONS[0]
    num_loads: int = 0
    gives_up: bool = False


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
    """Exchange votes with all ranks, and return the outcome, which is identical on all ranks. Collective.

    Args:
        communicator: the communicator of the voting ranks.
        vote: this rank's vote.
        watch: the layout watch, which sends its result together with the vote.
        purpose: names the vote in events and errors.

    Raises:
        RuntimeError: `watch` has found a changed memory layout on a rank.
        CommunicationError: ranks stop for different reasons. Or ranks have loaded weights different numbers of times
            when all ranks stop or a rank gives up. Or communication failed.
    """
    size, own = communicator.size, communicator.rank + 1
    requests = int(vote.wants_mean) + (_GIVES_UP if vote.gives_up else 0)
    message = watch.message(communicator.rank, size)  # an even number
    # Reasons matter only if the numbers of loads are equal.
    loads = (vote.num_loads * len(_REASONS) + _REASONS.index(vote.reason)) * size + communicator.rank
    values = [own if vote.leaves else 0, 0 if vote.stops else own, message * _GIVES_UP + requests, loads, -loads]
    leaving_rank, running_rank, largest, most, fewest = all_reduce_max(communicator, values, purpose)
    message, requests = divmod(largest, 2 * _GIVES_UP)
    watch.check(2 * message, size)
    fewest_loads, first_reason, behind = _unpack(-fewest, size)
    most_loads, last_reason, ahead = _unpack(most, size)
    ends = not leaving_rank and not running_rank
    if fewest_loads != most_loads and not leaving_rank and (ends or requests >= _GIVES_UP):
        loads_of = sorted({communicator.ranks[behind]: fewest_loads, communicator.ranks[ahead]: most_loads}.items())
        (first, first_number), (second, second_number) = loads_of
        raise different_loads((first, second), (first_number, second_number))
    if ends and first_reason != last_reason:
        seen = {communicator.ranks[behind]: _REASONS[first_reason], communicator.ranks[ahead]: _REASONS[last_reason]}
        reasons = ", ".join(f"rank {rank} for {reason}" for rank, reason in sorted(seen.items()))
        raise CommunicationError(f"torchbagua: ranks have stopped averaging for different reasons: {reasons}")
    return Outcome(
        leaving_rank - 1 if leaving_rank else None,
        running_rank - 1 if running_rank else None,
        ends and bool(requests % _GIVES_UP),
        most_loads if fewest_loads == most_loads else None,
    )


def _unpack(packed: int, size: int) -> tuple[int, int, int]:
    """Return the number of loads, the index of the reason, and the rank that are packed into `packed`."""
    rest, rank = divmod(packed, size)
    return *divmod(rest, len(_REASONS)), rank
