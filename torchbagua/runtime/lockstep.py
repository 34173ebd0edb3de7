"""Lockstep: the ranks of a weight algorithm compare their progress before each collective."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from torchbagua.collectives.agreement import require_same_progress
from torchbagua.runtime.changed_layout import OF_WEIGHTS, LayoutWatch
from torchbagua.runtime.job import Job
from torchbagua.runtime.lane import Lane
from torchbagua.runtime.load_record import LoadRecord, require_same_loads
from torchbagua.transport.communicator import Communicator
from torchbagua.transport.errors import CommunicationError

T = TypeVar("T")


class Lockstep:
    """What ranks compare when they meet: their progress, the loads of weights, and memory layouts.

    Args:
        lane: runs the comparisons, and what comes after them.
        world: the ranks.
        progress: returns numbers that say how far this rank has come, by the names that an error gives them. Each is
            below 2^40, and their number never changes.

    Attributes:
        loads: the loads of weights, from `AlgorithmImpl.weights_loaded`. If one is new, `submit` has ranks
            compare them.
        layout_watch: looks whether a parameter's memory layout has changed. If one has, all ranks raise in `submit`.
        num_overflow_checks: how often `agree_on_overflow` was called.
        fingerprint: a number below 2^40 that is the same on ranks with the same buckets; part of the progress.
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
        self, run: Callable[[], T], purpose: str, *, also: Mapping[str, int] | None = None, is_last: bool = False
    ) -> Job[T]:
        """Have the lane run a function once all ranks have called this. If their progress differs, all ranks raise.

        So they do if a rank has noted a load of weights in `loads` since the last call, and others have not.

        Args:
            run: the function.
            purpose: what it is for, in errors.
            also: further numbers that must be equal.
            is_last: whether this ends the attachment.
        """
        mark, is_new = self.loads.take()
        compare, world = self.comparison(purpose, flag=is_new, also=also, is_last=is_last), self._world

        def job() -> T:
            if compare():  # there is a new load on any rank
                require_same_loads(world, mark, purpose)
            return run()

        return self._lane.submit(job)

    def comparison(
        self, purpose: str, *, flag: bool = False, also: Mapping[str, int] | None = None, is_last: bool = False
    ) -> Callable[[], bool]:
        """Return what the lane is to call once all ranks are here. It returns whether one of them has set `flag`.

        It raises RuntimeError on all ranks if a rank has found another memory layout, and CommunicationError if their
        progress differs.
        """
        progress = {
            "ended attachments": int(is_last),
            **self._progress(),
            "as fingerprint of the tensors to average": self.fingerprint,
            **(also or {}),
        }
        world, watch = self._world, self.layout_watch
        message = watch.message(world.rank, world.size, flag=flag)

        def compare() -> bool:
            check = partial(watch.check, size=world.size)
            return watch.has_flag(require_same_progress(world, progress, purpose, message, check))

        return compare

    def agree_on_overflow(self, found_inf: bool, purpose: str = "the search for Inf") -> bool:
        """Return whether any rank has found an Inf or NaN in its gradients. Collective.

        Ranks compare their progress, and so they notice if one has skipped a step alone.
        """
        self.num_overflow_checks += 1
        return self._lane.submit(self.comparison(purpose, flag=found_inf)).result()

    def refuse_changed_layout(self) -> None:
        """Raise on all ranks, at the next comparison, that a parameter's memory layout has changed on this rank.

        Raises:
            RuntimeError: always; names the parameter.
        """
        try:
            self.submit(lambda: None, "the comparison of memory layouts").result()
        except CommunicationError as error:  # other ranks were gone, or too far behind
            raise self.layout_watch.own_error(self._world.rank) from error
