"""Rounds of model averaging that a lane makes beside training, which never waits for them."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from torchbagua.algorithms.model_averaging import ModelAveragingImpl
from torchbagua.collectives import CommunicationError, all_reduce_max, require_same_progress
from torchbagua.events import Details
from torchbagua.side_stream import StreamHandoff
from torchbagua.user_warning import warn_user

REASONS = ("abort", "detach", "new buckets", "load_state_dict")
"""Why a rank stops; all must have the same reason."""

# How long a snapshot is waited for where the rank has taken no step yet, whose length would tell.
_FIRST_PATIENCE_S = 0.1


class Clock(Protocol):
    """Tells the time and waits for it, in seconds."""

    def now(self) -> float:
        """Return the seconds since some moment."""
        ...

    def wait(self, turn: threading.Condition, timeout_s: float) -> None:
        """Wait until `turn` is notified, at most `timeout_s`."""
        ...


class MonotonicClock:
    """The machine's clock."""

    def now(self) -> float:
        """Return `time.monotonic()`."""
        return time.monotonic()

    def wait(self, turn: threading.Condition, timeout_s: float) -> None:
        """Wait until `turn` is notified, at most `timeout_s`."""
        turn.wait(timeout_s)


@dataclass(frozen=True)
class Ending:
    """How rounds came to an end.

    Attributes:
        leaver: the rank that left; None where all ranks have stopped.
        has_mean: whether the buckets hold one last mean, the same on all ranks.
    """

    leaver: int | None
    has_mean: bool


class BackgroundRounds:
    """Averages snapshots of the weights, round after round, until all ranks have stopped or one leaves.

    In each round:
    1. The lane waits for the interval, and then for a snapshot from the training thread, which gives it between two
       steps. Where none comes, because the rank evaluates, say, the last one serves again.
    2. Ranks tell each other whether they stop or leave.
    3. The lane averages the snapshots over the ranks.
    4. Mean minus snapshot waits for the training thread, which adds it to the weights between two steps, so that what
       they have gone through meanwhile is kept. A snapshot that serves again includes it.

    Args:
        impl: whose buckets are averaged, on whose lane. Their operations make of a snapshot the flat tensor, its mean.
        snapshots: one for each bucket.
        interval_s: pause between two rounds.
        clock: measures it.
    """

    def __init__(
        self, impl: ModelAveragingImpl, snapshots: Sequence[torch.Tensor], interval_s: float, clock: Clock
    ) -> None:
        self.num_rounds = 0
        self._impl = impl
        self._world = impl.process_group.world
        self._interval_s = interval_s
        # The others wait for this rank meanwhile, on the network.
        self._timeout_s = impl.process_group.timeout.total_seconds()
        self._longest_patience_s = self._timeout_s / 4
        self._clock = clock
        # Guards everything below. Snapshots are the training thread's while one is wanted, and the lane's otherwise.
        self._turn = threading.Condition()
        self._snapshots = snapshots
        self._device = impl.flats[0].device if impl.flats else torch.device("cpu")
        self._handoff = StreamHandoff(self._device)
        self._differences = [torch.zeros_like(flat) for flat in impl.flats]
        self._buffer_snapshots = [torch.zeros_like(bucket.flat) for bucket in impl.buffer_buckets]
        self._has_differences = False
        self._wants_snapshot = False
        self._is_behind = False  # whether the snapshots lack the last round's differences
        self._stops = False
        self._reason = 0
        self._wants_mean = False
        self._is_last_snapshot = False
        self._last_to_stop: int | None = None  # a rank that had not stopped yet at the last round
        self._leaves = False
        self._is_over = False
        self._num_steps = 0
        self._snapshot_at_step = 0
        self._averaged_at_step = 0  # when the snapshots behind the differences were taken
        self._step_s = 0.0
        self._last_step_at = clock.now()
        impl.read_weights(self._snapshots)
        self._handoff.record()
        self._facts = impl.facts()
        self._ending = impl.lane.submit(self._run, interrupt=self.leave)

    @property
    def ending(self) -> Ending | None:
        """How the rounds ended, or None while they go on. Raises RuntimeError where communication failed."""
        return self._ending.result() if self._ending.is_done() else None

    def after_step(self) -> None:
        """Between two steps, on the training thread: add what was averaged, give a snapshot where one is wanted."""
        with self._turn:
            now = self._clock.now()
            self._step_s, self._last_step_at = now - self._last_step_at, now
            self._num_steps += 1
            self._serve()

    def stop(self, reason: str, *, with_mean: bool) -> Ending:
        """Go on, on the training thread, until all ranks have called this; they may train for long.

        Where one of them wants it, there is a last mean then, and all ranks take it for their weights. A warning names
        a rank that is waited for longer than the group's timeout.

        Args:
            reason: one of REASONS.
            with_mean: whether this rank wants it.

        Raises:
            CommunicationError: communication failed, or another rank stops for another reason.
        """
        with self._impl.tracer.span("wait"), self._turn:
            self._stops, self._wants_mean, self._reason = True, with_mean, REASONS.index(reason)
            self._turn.notify_all()
            warn_at_s = self._clock.now() + self._timeout_s
            while not self._is_over and not self._ending.is_done():  # which it is at once on a lane that has failed
                # Not for ever: a lane that fails before it comes to the rounds notifies nobody.
                self._turn.wait_for(lambda: self._wants_snapshot or self._is_over, timeout=1.0)
                self._serve()
                if self._clock.now() > warn_at_s and self._last_to_stop is not None:
                    warn_at_s = math.inf
                    self._warn_of_waiting(reason)
            self._serve()
        ending = self._ending.result()
        if ending.has_mean:
            self._impl.write_weights(self._impl.flats)
        return ending

    def _warn_of_waiting(self, reason: str) -> None:
        warn_user(
            f"torchbagua: {reason} has waited longer than the timeout of {self._timeout_s:g} s for rank "
            f"{self._last_to_stop}, which still takes part in averaging: it is training, or stands still"
        )

    def leave(self) -> None:
        """End the rounds of all ranks, without waiting for it."""
        with self._turn:
            self._leaves = True
            self._turn.notify_all()

    def pending(self) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
        """Return copies of what `add_to_weights` is still to be given, or None; on the training thread."""
        with self._turn:
            if not self._has_differences:
                return None
            self._handoff.wait()
            copies = [[one.clone() for one in ones] for ones in (self._differences, self._buffer_snapshots)]
            self._handoff.record()
            return copies[0], copies[1]

    def _serve(self) -> None:
        self._handoff.wait()
        if self._has_differences:
            self._impl.add_to_weights(self._differences, self._buffer_snapshots)
            self._has_differences = False
            staleness = self._num_steps - self._averaged_at_step
            now_ns = time.perf_counter_ns()
            values = {"rounds": self.num_rounds, "staleness in steps": staleness}
            self._impl.tracer.tell("apply", now_ns, now_ns, Details(values=values))
        if self._wants_snapshot:
            self._impl.read_weights(self._snapshots)
            self._snapshot_at_step = self._num_steps
            self._wants_snapshot = self._is_behind = False
            self._is_last_snapshot = self._stops
            self._turn.notify_all()
        self._handoff.record()

    def _run(self) -> Ending:
        try:
            require_same_progress(self._world, self._facts, "the first of the averaging rounds")
            while True:
                self._await_snapshot()
                if (ending := self._agree_on_ending()) is not None and not ending.has_mean:
                    return ending
                for bucket, snapshot in zip(self._impl.buckets, self._snapshots, strict=True):
                    bucket.run()
                    if ending is None:
                        bucket.flat.sub_(snapshot)  # while it is in the caches
                self.num_rounds += 1
                if ending is not None:
                    return ending
                self._hand_over()
        finally:
            with self._turn:
                self._is_over = True
                self._turn.notify_all()

    def _await_snapshot(self) -> None:
        with self._turn:
            self._wait(self._interval_s, lambda: self._stops or self._leaves)
            self._handoff.record()
            self._wants_snapshot = True
            self._turn.notify_all()
            # A rank that trains gives one within a step, and one that stops gives one at once.
            patience_s = min(max(self._interval_s, 2 * self._step_s, _FIRST_PATIENCE_S), self._longest_patience_s)
            self._wait(patience_s, lambda: not self._wants_snapshot or self._stops or self._leaves)
            self._wait(self._longest_patience_s, lambda: not (self._wants_snapshot and self._stops) or self._leaves)
            self._wants_snapshot = False
            self._handoff.wait()
        if self._is_behind:
            for snapshot, difference in zip(self._snapshots, self._differences, strict=True):
                snapshot.add_(difference)
            self._is_behind = False

    def _agree_on_ending(self) -> Ending | None:
        with self._turn:
            leaver = self._world.rank + 1 if self._leaves else 0
            going_on = 0 if self._is_last_snapshot else self._world.rank + 1
            values = [leaver, going_on, int(self._wants_mean), self._reason, -self._reason]
        leaver, going_on, wants_mean, last_reason, minus_first_reason = all_reduce_max(
            self._world, values, f"averaging round {self.num_rounds}"
        )
        if leaver:
            return Ending(leaver=leaver - 1, has_mean=False)
        if going_on:
            self._last_to_stop = going_on - 1
            return None
        if last_reason != -minus_first_reason:
            reasons = f"{REASONS[-minus_first_reason]} and {REASONS[last_reason]}"
            raise CommunicationError(f"torchbagua: ranks have stopped averaging for different reasons: {reasons}")
        return Ending(leaver=None, has_mean=bool(wants_mean))

    def _hand_over(self) -> None:
        averaged = list(zip(self._impl.buckets, self._snapshots, strict=True))
        of_buffers = [snapshot.clone() for bucket, snapshot in averaged if bucket in self._impl.buffer_buckets]
        # So that a training thread that takes them does not wait for the network.
        self._impl.process_group.wait_for_gpu(self._device, f"averaging round {self.num_rounds}")
        with self._turn:
            self._handoff.wait()
            if self._has_differences:  # the training thread has not come since the last round
                for difference, (bucket, snapshot) in zip(self._differences, averaged, strict=True):
                    difference.add_(bucket.flat)
                    snapshot.add_(bucket.flat)
            else:
                for index, bucket in enumerate(self._impl.buckets):
                    self._differences[index], bucket.flat = bucket.flat, self._differences[index]
                self._buffer_snapshots = of_buffers
                self._averaged_at_step = self._snapshot_at_step
                self._has_differences = self._is_behind = True
            self._handoff.record()

    def _wait(self, timeout_s: float, is_done: Callable[[], bool]) -> None:
        deadline_s = self._clock.now() + timeout_s
        while not is_done() and (left_s := deadline_s - self._clock.now()) > 0:
            self._clock.wait(self._turn, left_s)
