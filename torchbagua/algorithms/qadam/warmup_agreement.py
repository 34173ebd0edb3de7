"""How far ranks have come past their warm-up: they agree on it before they send what depends on it."""

import weakref
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch

from torchbagua.algorithms.qadam.optimizer import QAdamOptimizer
from torchbagua.collectives.agreement import require_same_progress
from torchbagua.runtime.job import Job
from torchbagua.runtime.runner import Runner


class _Position(NamedTuple):
    """What one rank compares: its progress, and what it has found of memory layouts."""

    progress: Mapping[str, int]
    message: int


class WarmupAgreement:
    """Has ranks compare, in each backward, how far they have come past their warm-up. If they differ, all raise.

    What is sent may change its form after the warm-up too, by a state that is loaded, and a rank that has not loaded it
    does not know. Messages of unequal length would never end.

    The lane runs the comparison before the buckets that are submitted to it. In stream order buckets do not wait for
    their turn in the lane, and the host would wait for those of all ranks. So there are two comparisons for each
    backward, in the same order on all ranks:

    1. At the end of the step before it, or, where that was skipped, in the backward: what the backward begins with. The
       backward waits for it. Between the two lies a forward, so that it is done by then as a rule.
    2. In the backward: what it has begun with. A rank waits for it only if that is something else, since a state was
       loaded. It sends nothing before, and the lanes of the others end if they have not loaded it.

    Args:
        runner: that of the impl.
        q_adam: the optimizer.
    """

    def __init__(self, runner: Runner, q_adam: QAdamOptimizer) -> None:
        self._runner = runner
        self._q_adam = q_adam
        self._announced: tuple[_Position, Job[None]] | None = None
        self._confirmation: Job[None] | None = None
        self._listens = False

    def compare(self, device: torch.device) -> None:
        """Compare; called at the first bucket of each backward.

        Args:
            device: of the gradients.

        Raises:
            CommunicationError: in stream order: two ranks differ, or one is gone. Else the buckets raise it.
            RuntimeError: in stream order: the memory layout of a parameter has changed on a rank.
        """
        world = self._runner.process_group.world
        if not world.in_stream_order(device):
            self._submit(self._position())
            return
        self._listen()
        position = self._position()
        announced, agreement = self._announced or (position, self._submit(position))
        self._announced = None
        agreement.result()
        self._confirmation = self._submit(position)
        if position != announced:
            self._confirmation.result()

    def _position(self) -> _Position:
        num_updates = self._q_adam.num_updates_past_warmup.values()
        progress = {
            "parameters past their warm-up": len(num_updates),
            "updates of parameters past their warm-up": sum(num_updates),
        }
        world, layout_watch = self._runner.process_group.world, self._runner.gradient_buckets.layout_watch
        return _Position(progress, layout_watch.message(world.rank, world.size))

    def _submit(self, position: _Position) -> Job[None]:
        world, layout_watch = self._runner.process_group.world, self._runner.gradient_buckets.layout_watch

        def compare() -> None:
            check = partial(layout_watch.check, size=world.size)
            require_same_progress(world, position.progress, "the gradients", position.message, check)

        return self._runner.lane.submit(compare)

    def _listen(self) -> None:
        """Announce at the end of each step from now on. The optimizer, which may live longer, does not hold this."""
        watch = next((watch for watch in self._runner.step_watches if watch.optimizer is self._q_adam), None)
        if watch is None or self._listens:
            return
        self._listens = True
        reference = weakref.ref(self)

        def after_step(optimizer: torch.optim.Optimizer, is_taken: bool) -> None:
            if (agreement := reference()) is not None:
                agreement._raise_if_refused()
                agreement._announce()

        watch.add(after_step, reads_overflow=False)
        weakref.finalize(self, watch.remove, after_step).atexit = False
        self._runner.on_close(partial(watch.remove, after_step), first=True)
        self._runner.on_joined_backward(self._announce)  # a rank that takes no step, as the others do at theirs
        self._runner.on_close(self._announce_at_end, first=True)

    def _raise_if_refused(self) -> None:
        """Raise what the comparison of this backward has found so far, before the host waits for a stuck GPU."""
        if self._confirmation is not None and self._confirmation.is_done():
            self._confirmation.result()

    def _announce_at_end(self) -> None:
        """Announce on a rank whose last backward had no step, since others' may have: all compare as often."""
        if self._runner.ends_in_order and not self._runner.lane.has_failed:
            self._announce()

    def _announce(self) -> None:
        if self._announced is None:  # steps without a backward between them: the first one's stands
            position = self._position()
            self._announced = position, self._submit(position)
