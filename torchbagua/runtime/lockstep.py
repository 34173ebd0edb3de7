"""Lockstep: the ranks of a weight algorithm compare their progress before each collective."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from torchbagua.collectives.agreement import fingerprint, require_same_progress
from torchbagua.runtime.changed_layout import OF_WEIGHTS, LayoutWatch
from torchbagua.runtime.job import Job
from torchbagua.runtime.lane import Lane
from torchbagua.runtime.load_record import LoadRecord, require_same_loads
from torchbagua.transport.communicator import Communicator
from torchbagua.transport.errors import CommunicationError

T = TypeVar("T")


class Lockstep:
    """Compares the progress, the loads of weights and the memory layouts of the ranks before each collective.

    Args:
        lane: runs the comparisons, and the functions that follow them.
        world: the ranks.
        progress: returns numbers that describe the progress of this rank, keyed by their names in errors. Each is below
            2^40. The set of names never changes.

    Attributes:
        loads: the loads of weights, from `AlgorithmImpl.weights_loaded`. If a load is new, ranks compare their loads
            in `submit`.
        layout_watch: detects a change of a parameter's memory layout. After a change, all ranks raise in `submit`.
        num_overflow_checks: the number of calls of `agree_on_overflow`.
        fingerprint: a number below 2^40 that is equal on ranks with equal buckets; part of the progress.
    """

    def __init__(self, lane: Lane, world: Communicator, progress: Callable[[], Mapping[str, int]]) -> None:
        self.loads = LoadRecord()
        self.layout_watch = LayoutWatch(OF_WEIGHTS)
        self.fingerprint = 0
        self.num_overflow_checks = 0
        self._lane = lane
        self._world = world
        self._progress = progress

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
                require_same_loads(world, mark, purpose)
            return run()

        return self._lane.submit(job)

    def comparison(
        self, purpose: str, *, flag: bool = False, also: tuple[str, int] | None = None, is_last: bool = False
    ) -> Callable[[], bool]:
        """Return a collective function for the lane to call. It returns whether any rank has set `flag`.

        The function raises RuntimeError on all ranks if a memory layout has changed on any of them, and
        CommunicationError if their progress differs.
        """
        # Every call compares the same number of values, since ranks may be in different calls.
        name, number = also or ("as an additional number", 0)
        progress = {
            "ended attachments": int(is_last),
            **self._progress(),
            "as fingerprint of the tensors to average": self.fingerprint,
            "as digest of its call": fingerprint(purpose),
            name: number,
        }
        world, watch = self._world, self.layout_watch
        message = watch.message(world.rank, world.size, flag=flag)

        def compare() -> bool:
            check = partial(watch.check, size=world.size)
            return watch.has_flag(require_same_progress(world, progress, purpose, message, check))

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
