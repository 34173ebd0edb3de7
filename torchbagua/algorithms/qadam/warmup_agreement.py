"""Agreement of the ranks on their progress past the warm-up, before they send data that depends on it."""

import weakref
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch

from torchbagua import _concurrency
from torchbagua.algorithms.qadam.optimizer import QAdamOptimizer
from torchbagua.collectives.agreement import require_same_progress
from torchbagua.runtime.job import Job
from torchbagua.runtime.runner import Runner


class _Position(NamedTuple):
    """The values that a rank compares: its progress, and the result of its check of memory layouts."""

    progress: Mapping[str, int]
    message: int


class WarmupAgreement:
    """Compares the ranks' progress past the warm-up in each backward. If it differs, all ranks raise.

    The form of the sent data may also change after the warm-up, when a state is loaded, and a rank that has not loaded
    the state does not know of the change. Ranks with messages of different lengths would block forever.

    The lane runs the comparison before the buckets that are submitted to it. In stream order, however, buckets do not
    wait for their turn in the lane, and the host would have to wait for the buckets of all ranks. So each backward has
    two comparisons, in the same order on all ranks:

    1. At the end of the preceding step, or in the backward if that step was skipped: compare the expected progress at
       the start of the backward. The backward waits for this comparison. A forward runs in between, so the comparison
       has usually finished by then.
    2. In the backward: compare the actual progress at its start. A rank waits for this comparison only if the progress
       differs from the first comparison because a state was loaded. The rank sends nothing before that, and the lanes
       of ranks that have not loaded the state fail.

    Args:
        runner: the impl's runner.
        q_adam: the optimizer.
    """

    def __init__(self, runner: Runner, q_adam: QAdamOptimizer) -> None:
        self._runner = runner
        self._q_adam = q_adam
        self._announced: tuple[_Position, Job[None]] | None = None
        self._confirmation: Job[None] | None = None
        self._is_listening = False

    def compare(self, device: torch.device) -> None:
        """Compare the progress. Called at the first bucket of each backward.

        Args:
            device: the device of the gradients.

        Raises:
            CommunicationError: in stream order, two ranks differ or a rank has disconnected. Otherwise, the buckets
                raise it.
            RuntimeError: in stream order, the memory layout of a parameter has changed on a rank.
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

        return self._runner.submit_agreement(compare)

    def _listen(self) -> None:
        """Announce at the end of each step from now on. The optimizer, which may live longer, keeps no reference."""
        watch = next((watch for watch in self._runner.step_watches if watch.optimizer is self._q_adam), None)
        if watch is None or self._is_listening:
            return
        self._is_listening = True
        reference = weakref.ref(self)

        def after_step(optimizer: torch.optim.Optimizer, is_taken: bool) -> None:
            if (agreement := reference()) is not None:
                agreement._raise_if_refused()
                agreement._announce()

        watch.add(after_step, reads_overflow=False)
        _concurrency.finalize(self, watch.remove, after_step).atexit = False
        self._runner.on_close(partial(watch.remove, after_step), first=True)
        self._runner.on_joined_backward(self._announce)  # a joined rank takes no steps, the others announce at theirs
        self._runner.on_close(self._announce_at_end, first=True)

    def _raise_if_refused(self) -> None:
        """Raise an error that this backward's comparison has already found, before the host waits for a stuck GPU."""
        if self._confirmation is not None and self._confirmation.is_done():
            self._confirmation.result()

    def _announce_at_end(self) -> None:
        """Announce if this rank's last backward had no step. Other ranks may have stepped, and all must compare."""
        if self._runner.ends_in_order and not self._runner.lane.has_failed:
            self._announce()

    def _announce(self) -> None:
        if self._announced is None:  # after several steps without a backward, the first announcement remains valid
            position = self._position()
            self._announced = position, self._submit(position)
