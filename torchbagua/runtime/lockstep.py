"""Lockstep: what ranks that average weights compare before each round: progress, loads of weights, and layouts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from torchbagua.collectives.agreement import (
    Progress,
    agree,
    fingerprint,
    fingerprint_of_values,
    first_difference,
    require_same_progress,
)
from torchbagua.runtime.lane import Job, Lane
from torchbagua.runtime.parameters import OF_WEIGHTS, LayoutWatch
from torchbagua.transport.communicator import Communicator
from torchbagua.transport.errors import CommunicationError

T = TypeVar("T")


@dataclass(frozen=True)
class LoadMark:
    """A summary of the loads of weights on a rank.

    Attributes:
        num_loads: the number of loads.
        digest: a fingerprint of the loaded names and values.
        is_pending: whether the last load has not taken effect yet, and is not in the digest.
    """

    num_loads: int = 0
    digest: int = 0
    is_pending: bool = False

    def with_pending(self) -> "LoadMark":
        """Return the mark with one more load, which has not taken effect yet."""
        return LoadMark(self.num_loads + 1, self.digest, is_pending=True)


class LoadRecord:
    """Records the loads of weights into the module of one rank since attach.

    Attributes:
        mark: the summary of the loads that have taken effect.
        is_pending: whether weights were loaded that have not taken effect yet, since no step has begun.
    """

    def __init__(self) -> None:
        self.is_pending = False
        self.forget()

    def note_pending(self, is_pending: bool) -> None:
        """Set `is_pending`."""
        self.is_pending = is_pending

    def forget(self) -> None:
        """Reset the record, on all ranks: a loaded state defines the weights of each rank."""
        self.mark = self._compared = LoadMark()

    def add(self, values: Mapping[str, torch.Tensor]) -> None:
        """Record a load of these values, keyed by weight name."""
        names = sorted(values)
        digest = fingerprint((self.mark.digest, names, fingerprint_of_values(values[name] for name in names)))
        self.mark = LoadMark(self.mark.num_loads + 1, digest)

    def take(self) -> tuple[LoadMark, bool]:
        """Return the mark, and whether ranks must still compare it. Later calls treat this mark as compared.

        A pending load is included, since other ranks may have begun a step. But it is not new: it may be undone.
        """
        is_new = self.mark != self._compared
        self._compared = self.mark
        return self.mark.with_pending() if self.is_pending else self.mark, is_new


def require_same_loads(communicator: Communicator, marks: Sequence[LoadMark]) -> None:
    """Raise CommunicationError unless all ranks have recorded the same loads, given the mark of each.

    While a load is pending on any rank, they compare only the numbers of loads. They compare the values later.
    """
    require_same_numbers(communicator, [mark.num_loads for mark in marks])
    if not any(mark.is_pending for mark in marks):
        digests = [{"a digest of the loaded values": mark.digest} for mark in marks]
        _refuse(first_difference(digests, communicator.ranks))


def require_same_numbers(communicator: Communicator, num_loads: Sequence[int]) -> None:
    """Raise CommunicationError unless these numbers of loads, one for each rank, are equal."""
    _refuse(first_difference([{"the number of loads": number} for number in num_loads], communicator.ranks))


def _refuse(difference: str | None) -> None:
    if difference is not None:
        raise CommunicationError(
            f"torchbagua: ranks have not loaded the same weights since attach: {difference}. Load the same values on "
            "all ranks; if one rank loads and broadcasts them, call attachment.weights_changed() on all ranks "
            "afterwards. To resume each rank's own weights, load the attachment's state after them. To change one "
            "rank's weights alone, write them in place: parameter.copy_(value) under torch.no_grad()"
        )


class Lockstep:
    """Compares the progress, the loads of weights and the memory layouts of the ranks before each collective.

    Args:
        lane: runs the comparisons, and the functions that follow them.
        world: the ranks.
        progress: returns numbers that describe the progress of this rank, keyed by their names in errors.

    Attributes:
        loads: the loads of weights, from `AlgorithmImpl.weights_loaded`. If a load is new, ranks compare their loads
            in `submit`.
        layout_watch: detects a change of a parameter's memory layout. After a change, all ranks raise in `submit`.
        num_overflow_checks: the number of calls of `agree_on_overflow`.
        fingerprint: a number that is equal on ranks with equal buckets; part of the progress.
    """

    def __init__(self, lane: Lane, world: Communicator, progress: Callable[[], Mapping[str, int]]) -> None:
        self.loads = LoadRecord()
        self.layout_watch = LayoutWatch(OF_WEIGHTS)
        self.fingerprint = 0
        self.num_overflow_checks = 0
        self._lane = lane
        self._world = world
        self._progress = progress

    def set_layout(self, layout: object) -> None:
        """Have ranks compare the repr of `layout`, which describes their buckets."""
        self.fingerprint = fingerprint(layout)

    def submit(
        self, run: Callable[[], T], purpose: str, *, also: tuple[str, int] | None = None, is_last: bool = False
    ) -> Job[T]:
        """Have the lane run a function once all ranks have called this. If their progress differs, all ranks raise.

        All ranks also raise if, since the last call, they have not recorded the same loads of weights in `loads`.

        Args:
            run: the function.
            purpose: the purpose of the call, for errors; the same on all ranks.
            also: an additional number that must be equal on all ranks, after its name in errors.
            is_last: whether this call ends the attachment.
        """
        mark, is_new = self.loads.take()
        compare, world = self.comparison(purpose, flag=is_new, also=also, is_last=is_last), self._world

        def job() -> T:
            if compare():  # some rank has a new load
                require_same_loads(world, agree(world, mark, purpose))
            return run()

        return self._lane.submit(job)

    def comparison(
        self, purpose: str, *, flag: bool = False, also: tuple[str, int] | None = None, is_last: bool = False
    ) -> Callable[[], bool]:
        """Return a collective function for the lane to call. It returns whether any rank has set `flag`.

        The function raises RuntimeError on all ranks if a memory layout has changed on any of them, and
        CommunicationError if their progress differs.
        """
        numbers = {
            "ended attachments": int(is_last),
            **self._progress(),
            "the fingerprint of the tensors to average": self.fingerprint,
        }
        if also is not None:
            numbers.update([also])
        world, watch = self._world, self.layout_watch
        own = Progress(purpose, numbers, watch.changed_parameter, flag)

        def compare() -> bool:
            of_ranks = agree(world, own, purpose)
            watch.check([progress.changed_parameter for progress in of_ranks])  # first: a rank that refuses is behind
            require_same_progress(world, of_ranks)
            return any(progress.flag for progress in of_ranks)

        return compare

    def agree_on_overflow(self, found_inf: bool, purpose: str = "the search for Inf") -> bool:
        """Return whether any rank has found an Inf or NaN in its gradients. Collective.

        Ranks also compare their progress, which detects a rank that skipped a step alone.
        """
        self.num_overflow_checks += 1
        return self._lane.submit(self.comparison(purpose, flag=found_inf)).result()

    def refuse_changed_layout(self) -> None:
        """Report a changed memory layout on this rank, so that all ranks raise at their next comparison.

        Raises:
            RuntimeError: always; names the parameter.
        """
        try:
            self.submit(lambda: None, "the comparison of memory layouts").result()
        except CommunicationError as error:  # other ranks have disconnected, or are too far behind
            raise self.layout_watch.local_error(self._world.rank) from error
