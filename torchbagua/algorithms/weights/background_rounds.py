"""Rounds of model averaging that the lane runs concurrently with training, which never waits for them."""

import math
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch

from torchbagua import _concurrency
from torchbagua._warnings import warn_user
from torchbagua.algorithms.weights.votes import Outcome, Reason, Vote, count_votes
from torchbagua.observe.events import Details
from torchbagua.runtime.lockstep import LoadMark, require_same_loads
from torchbagua.runtime.runner import Runner
from torchbagua.runtime.weight_buckets import DIFFERENCE, FLAT, SNAPSHOT, FlatOf, WeightBucket, WeightBuckets
from torchbagua.transport.errors import BUSY_ADVICE, CommunicationError
from torchbagua.transport.streams import StreamHandoff

RoundPhase = Literal["pause", "asked", "ready", "averaging", "over"]
"""In a round, the lane waits for the interval, waits for a snapshot, has a snapshot, and averages. Finally: "over"."""

# How long the lane waits for a snapshot before the rank's first step, while the duration of a step is not yet known.
_FIRST_PATIENCE_S = 0.1


class WaitClock(Protocol):
    """Returns the time and waits, in seconds."""

    def now(self) -> float:
        """Return the seconds since an arbitrary reference time."""
        ...

    def wait(self, changed: _concurrency.Condition, timeout_s: float) -> None:
        """Wait until `changed` is notified, at most `timeout_s`."""
        ...


class MonotonicWaitClock:
    """The machine's clock."""

    def now(self) -> float:
        """Return `time.monotonic()`."""
        return _concurrency.monotonic()

    def wait(self, changed: _concurrency.Condition, timeout_s: float) -> None:
        """Wait until `changed` is notified, at most `timeout_s`."""
        changed.wait(timeout_s)


@dataclass(frozen=True)
class SnapshotInfo:
    """Describes when the buckets' snapshots were taken.

    Attributes:
        step: the number of steps, since the rounds began, before the snapshots.
        num_rounds: the number of rounds whose differences the snapshots include.
        vote: the rank's vote when it provided the snapshots.
        loads: the loads of weights before the snapshots.
    """

    step: int
    num_rounds: int
    vote: Vote
    loads: LoadMark


@dataclass(frozen=True)
class PendingInfo:
    """Describes the buckets' differences that are not yet applied to the weights.

    Attributes:
        step: the step of the snapshot that was subtracted.
        buffers: that snapshot, for the buckets of buffers.
    """

    step: int
    buffers: Mapping[WeightBucket, torch.Tensor]


class BackgroundRounds:
    """Averages snapshots of the weights, round after round, until all ranks have stopped or a rank leaves.

    In each round:
    1. The lane waits for the interval, and then for a snapshot from the training thread, which provides it between two
       steps. If the thread provides none, for example during evaluation, the lane reuses the last snapshot, updated by
       the differences of the rounds since then. So a rank may evaluate longer than the timeout.
    2. The ranks exchange votes: whether they stop or leave.
    3. The lane averages the snapshots over the ranks.
    4. The training thread adds mean minus snapshot to the weights between two steps, which preserves the updates that
       were made meanwhile.

    A snapshot from before a load of weights never changes the loaded weights. While ranks have seen different numbers
    of loads, nothing is averaged, and differences of older rounds are dropped for the loaded weights. If ranks differ
    for longer than the timeout, all ranks raise.

    Args:
        runner: the impl's runner. The rounds run on its lane.
        weights: the weights to average.
        average: a function of (bucket, is_exact, names) that writes the mean of a bucket's snapshots, or this rank's
            estimate of it, to the bucket's flat tensor. `is_exact` requires the mean, identical on all ranks. It is
            True in the first round, in the last round, and in the first round after a load of weights, and `names` are
            the loaded weights. The function must not reference the module, even indirectly.
        interval_s: the pause between two rounds.
        clock: measures the pause.

    Attributes:
        num_rounds: rounds finished so far.
    """

    def __init__(
        self,
        runner: Runner,
        weights: WeightBuckets,
        average: Callable[[WeightBucket, bool, Collection[str]], None],
        interval_s: float,
        clock: WaitClock,
    ) -> None:
        self.num_rounds = 0
        self._group = runner.process_group
        self._tracer = runner.tracer
        # The lane references the rounds, so they must not reference the module: when it is unreferenced, the lane ends.
        self._weights_reference = weakref.ref(weights)
        self._buckets = list(weights)
        self._average = average
        self._compare_progress = weights.lockstep.comparison("the first of the averaging rounds")
        self._layout_watch = weights.lockstep.layout_watch
        self._interval_s = interval_s
        # While this rank waits for a snapshot, the other ranks wait for it on the network.
        self._timeout_s = runner.process_group.timeout.total_seconds()
        self._max_patience_s = self._timeout_s / 4
        self._clock = clock
        self._device = next((bucket.flat.device for bucket in self._buckets), torch.device("cpu"))
        self._handoff = StreamHandoff(self._device)
        self._running_rank: int | None = None  # a rank that had not stopped at the last round; written by the lane
        # Used only by the lane: the last load that all ranks have seen, and since when the numbers of loads differ.
        self._compared = LoadMark()
        self._loads_differ_since_s: float | None = None
        # Guards everything below. The training thread owns the buckets' snapshots while the lane asks for them, and the
        # lane owns them otherwise.
        self._changed = _concurrency.Condition()
        self._phase: RoundPhase = "pause"
        self._vote = Vote()
        self._loads = weights.lockstep.loads.mark
        self._loaded: set[str] = set()  # names of weights
        self._loaded_since_snapshot: set[str] = set()
        self._snapshot_info = SnapshotInfo(step=0, num_rounds=0, vote=self._vote, loads=self._loads)
        self._pending_info: PendingInfo | None = None
        self._num_steps = 0
        self._step_s = 0.0
        self._last_step_at_s = clock.now()
        weights.read(SNAPSHOT)
        for bucket in self._buckets:
            bucket.difference.zero_()  # creates the tensor here, and therefore on this thread's stream
        self._handoff.record()
        self._check_process = runner.lane.check_process
        self._job = runner.lane.submit(self._run, interrupt=self.leave)

    @property
    def outcome(self) -> Outcome | None:
        """How the rounds ended, or None while they continue. Raises RuntimeError if communication failed."""
        return self._job.result() if self._job.is_done() else None

    @property
    def _weights(self) -> WeightBuckets:
        """The weights that the training thread reads and writes."""
        weights = self._weights_reference()
        assert weights is not None
        return weights

    def after_step(self) -> None:
        """Apply pending differences, and take a snapshot if the lane asks. Called by training between two steps."""
        self._check_process()  # in a forked process, the lane may have held the lock
        with self._changed:
            now_s = self._clock.now()
            self._step_s, self._last_step_at_s = now_s - self._last_step_at_s, now_s
            self._num_steps += 1
            self._apply_and_snapshot()

    def weights_loaded(self, names: Collection[str], loads: LoadMark) -> None:
        """Drop the differences of loaded weights to snapshots from before the load. Called by the training thread."""
        with self._changed:
            self._loads = loads
            self._loaded.update(names)
            self._loaded_since_snapshot.update(names)
            if self._pending_info is not None:
                self._handoff.wait()
                for bucket in self._weights:
                    bucket.clear(bucket.difference, names)
                self._handoff.record()

    def stop(self, reason: Reason, *, with_mean: bool, loading: Collection[str] = ()) -> Outcome:
        """Continue the rounds until all ranks have called this, which may take long. Called by the training thread.

        If any rank requests it, the rounds end with a last mean, and all ranks set their weights to it. If this rank
        has waited for another one for longer than the group's timeout, `averaged_weights` raises an error. All other
        callers only warn: a rank may train for long after others have finished.

        Args:
            reason: why the rounds stop. It must be the same on all ranks.
            with_mean: whether this rank requests a last mean.
            loading: names of weights that were loaded since the last step.

        Raises:
            CommunicationError: communication failed, another rank stops for another reason, or `averaged_weights` has
                waited for longer than the timeout. The rounds continue in the last case.
        """
        self._check_process()
        if loading:  # so that ranks that have not loaded do not change the loaded weights until all have stopped
            self.weights_loaded(loading, self._loads.with_pending())
        with self._tracer.span("wait"), self._changed:
            self._vote = replace(self._vote, stops=True, wants_mean=with_mean, reason=reason)
            self._changed.notify_all()
            late_at_s = self._clock.now() + self._timeout_s
            while self._phase != "over" and not self._job.is_done():  # on a failed lane, the job is done at once
                # With a timeout, because a lane that fails before it starts the rounds does not notify.
                self._changed.wait_for(lambda: self._phase in ("asked", "over"), timeout=1.0)
                self._apply_and_snapshot()
                if self._clock.now() > late_at_s and self._running_rank is not None:
                    late_at_s = math.inf
                    self._report_waiting(reason)
            self._apply_and_snapshot()
        outcome = self._job.finish()
        if outcome.has_mean:
            self._weights.write()
        return outcome

    def _report_waiting(self, reason: Reason) -> None:
        waited = (
            f"torchbagua: {reason} has waited longer than the timeout of {self._timeout_s:g} s for rank "
            f"{self._running_rank}"
        )
        if reason == "averaged_weights":
            self._vote = replace(self._vote, stops=False)
            raise CommunicationError(f"{waited}; all ranks must enter it: {BUSY_ADVICE}")
        warn_user(f"{waited}, which still participates in averaging because it is training or blocked")

    def leave(self) -> None:
        """End the rounds of all ranks, without waiting for their end."""
        with self._changed:
            self._vote = replace(self._vote, leaves=True)
            self._changed.notify_all()

    def pending(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] | None:
        """Return the differences that are not yet applied, and the snapshots of buffers, both by name; or None."""
        with self._changed:
            if self._pending_info is None:
                return None
            self._handoff.wait()
            buffers = self._pending_info.buffers
            copies = self._weights.by_name(DIFFERENCE), self._weights.by_name(buffers.__getitem__, buffers)
            self._handoff.record()
            return copies

    def _apply_and_snapshot(self) -> None:
        """Apply pending differences to the weights, and take a snapshot if the lane has asked for one."""
        self._handoff.wait()
        if self._pending_info is not None:
            self._weights.add(DIFFERENCE, self._pending_info.buffers.__getitem__)
            staleness = self._num_steps - self._pending_info.step
            self._pending_info = None
            now_ns = _concurrency.perf_counter_ns()
            values = {"rounds": self.num_rounds, "staleness in steps": staleness}
            self._tracer.tell("apply", now_ns, now_ns, Details(values=values))
        if self._phase == "asked":
            self._weights.read(SNAPSHOT)
            self._snapshot_info = SnapshotInfo(self._num_steps, self.num_rounds, self._vote, self._loads)
            self._loaded_since_snapshot.clear()
            self._phase = "ready"
            self._changed.notify_all()
        self._handoff.record()

    def _run(self) -> Outcome:
        try:
            self._compare_progress()
            while True:
                self._await_snapshot()
                outcome = self._agree()
                ends = outcome.leaving_rank is not None or outcome.running_rank is None
                if ends and not outcome.has_mean:
                    return outcome
                if outcome.num_loads is None:
                    continue
                loaded = self._compare_loads(outcome.num_loads)
                for bucket in self._buckets:
                    self._average(bucket, ends or self.num_rounds == 0 or bool(loaded), loaded)
                    if not ends:
                        bucket.subtract(bucket.flat, bucket.snapshot, out=bucket.flat)  # while it is in the caches
                self.num_rounds += 1
                if ends:
                    return outcome
                self._publish_differences()
        finally:
            with self._changed:
                self._phase = "over"
                self._changed.notify_all()

    def _await_snapshot(self) -> None:
        with self._changed:
            # 1. Wait for the interval, unless this rank stops.
            self._phase = "pause"
            self._wait(self._interval_s, lambda: self._vote.stops)
            self._handoff.record()
            # 2. Wait for a snapshot, or until this rank stops. A training rank answers within a step. If it does not
            # answer by then, for example because it evaluates, its last snapshot is sent again.
            self._phase = "asked"
            self._changed.notify_all()
            patience_s = min(max(self._interval_s, 2 * self._step_s, _FIRST_PATIENCE_S), self._max_patience_s)
            self._wait(patience_s, lambda: self._phase == "ready" or self._vote.stops)
            # 3. A rank that stops must answer, and does so at once: its last snapshot is its last weights.
            self._wait(self._max_patience_s, lambda: self._phase == "ready" or not self._vote.stops)
            self._phase = "averaging"
            self._handoff.wait()
            if self._snapshot_info.num_rounds < self.num_rounds:
                self._advance_snapshot(DIFFERENCE)

    def _agree(self) -> Outcome:
        with self._changed:
            # A vote to stop counts from the rank's last snapshot on; a vote to leave counts at once.
            gives_up = (
                self._loads_differ_since_s is not None
                and self._clock.now() - self._loads_differ_since_s > self._timeout_s
            )
            vote = replace(
                self._snapshot_info.vote,
                leaves=self._vote.leaves,
                num_loads=self._snapshot_info.loads.num_loads,
                gives_up=gives_up,
            )
        outcome = count_votes(self._group.world, vote, self._layout_watch, f"averaging round {self.num_rounds}")
        self._running_rank = outcome.running_rank
        if outcome.num_loads is not None:
            self._loads_differ_since_s = None
        elif self._loads_differ_since_s is None:
            self._loads_differ_since_s = self._clock.now()
        return outcome

    def _compare_loads(self, num_loads: int) -> frozenset[str]:
        """Return the names of the weights loaded so far if the number of loads has changed, else an empty set.

        Raises:
            CommunicationError: ranks have loaded different values.
        """
        if num_loads == self._compared.num_loads:
            return frozenset()
        with self._changed:
            self._compared = self._snapshot_info.loads
            loaded = frozenset(self._loaded)
        require_same_loads(self._group.world, self._compared, f"averaging round {self.num_rounds}")
        return loaded

    def _publish_differences(self) -> None:
        """Pass the flat tensors, which contain mean minus snapshot, to the training thread."""
        buffers = {bucket: bucket.snapshot.clone() for bucket in self._buckets if bucket.are_buffers}
        # So that the training thread does not wait for the network when it applies the differences.
        self._group.private.wait_for_gpu(self._device, f"averaging round {self.num_rounds}")
        with self._changed:
            self._handoff.wait()
            for bucket in self._buckets if self._loaded_since_snapshot else ():
                bucket.clear(bucket.flat, self._loaded_since_snapshot)
            if self._pending_info is None:
                for bucket in self._buckets:
                    bucket.difference, bucket.flat = bucket.flat, bucket.difference
                self._pending_info = PendingInfo(self._snapshot_info.step, buffers)
            else:  # the training thread has not applied the differences of the previous round
                for bucket in self._buckets:
                    bucket.difference.add_(bucket.flat)
                self._advance_snapshot(FLAT)
            self._handoff.record()

    def _advance_snapshot(self, last_difference: FlatOf) -> None:
        """Add the last differences to the snapshot, which may be sent again, as the weights will add them too."""
        for bucket in self._buckets:
            bucket.snapshot.add_(last_difference(bucket))
        self._snapshot_info = replace(self._snapshot_info, num_rounds=self.num_rounds)

    def _wait(self, timeout_s: float, is_done: Callable[[], bool]) -> None:
        """Wait until `is_done()`, until the rank leaves, or at most `timeout_s`."""
        deadline_s = self._clock.now() + timeout_s
        while not (is_done() or self._vote.leaves) and (remaining_s := deadline_s - self._clock.now()) > 0:
            self._clock.wait(self._changed, remaining_s)
