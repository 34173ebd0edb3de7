"""Rounds of model averaging that a lane makes beside training, which never waits for them."""

import math
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch

from torchbagua._warnings import warn_user
from torchbagua.algorithms.weights.votes import Outcome, Reason, Vote, count_votes
from torchbagua.observe.events import Details
from torchbagua.runtime.load_record import LoadMark, require_same_loads
from torchbagua.runtime.runner import Runner
from torchbagua.runtime.weight_bucket import DIFFERENCE, FLAT, SNAPSHOT, FlatOf, WeightBucket
from torchbagua.runtime.weight_buckets import WeightBuckets
from torchbagua.transport.streams import StreamHandoff

RoundPhase = Literal["pause", "asked", "ready", "averaging", "over"]
"""Of a round: the lane waits for the interval; for a snapshot; has one; averages it. At last the rounds are over."""

# How long a snapshot is waited for where the rank has taken no step yet, whose length would tell.
_FIRST_PATIENCE_S = 0.1


class WaitClock(Protocol):
    """Tells the time and waits for it, in seconds."""

    def now(self) -> float:
        """Return the seconds since some moment."""
        ...

    def wait(self, changed: threading.Condition, timeout_s: float) -> None:
        """Wait until `changed` is notified, at most `timeout_s`."""
        ...


class MonotonicWaitClock:
    """The machine's clock."""

    def now(self) -> float:
        """Return `time.monotonic()`."""
        return time.monotonic()

    def wait(self, changed: threading.Condition, timeout_s: float) -> None:
        """Wait until `changed` is notified, at most `timeout_s`."""
        changed.wait(timeout_s)


@dataclass(frozen=True)
class SnapshotInfo:
    """When the buckets' snapshots were taken.

    Attributes:
        step: the weights after so many steps since the rounds began.
        num_rounds: with the differences of so many rounds in them.
        vote: what the rank said when it gave them.
        loads: the loads of weights that they are from after.
    """

    step: int
    num_rounds: int
    vote: Vote
    loads: LoadMark


@dataclass(frozen=True)
class PendingInfo:
    """What goes with the buckets' differences, while the weights are still to be given them.

    Attributes:
        step: of the snapshot that these are the differences to.
        buffers: that snapshot, of the buckets of buffers.
    """

    step: int
    buffers: Mapping[WeightBucket, torch.Tensor]


class BackgroundRounds:
    """Averages snapshots of the weights, round after round, until all ranks have stopped or one leaves.

    In each round:
    1. The lane waits for the interval, and then for a snapshot from the training thread, which gives it between two
       steps. Where none comes, because the rank evaluates, say, the last one serves again, with what the rounds since
       have changed: a rank may evaluate longer than the timeout.
    2. Ranks tell each other whether they stop or leave.
    3. The lane averages the snapshots over the ranks.
    4. Mean minus snapshot waits for the training thread, which adds it to the weights between two steps, so that what
       they have gone through meanwhile is kept.

    A snapshot from before a load of weights never changes what was loaded: as long as ranks have seen different numbers
    of loads nothing is averaged, and what older rounds would change of the loaded weights is dropped. Ranks that differ
    for longer than the timeout all raise.

    Args:
        runner: that of the impl; on its lane they run.
        weights: what is averaged.
        average: writes the mean of a bucket's snapshots to its flat tensor, or what a rank is to take for it. It is
            told whether that must be the mean, the same on all ranks: in the first round and the last, and in the first
            after a load of weights, whose names it is told too. Nothing leads from it to the module.
        interval_s: pause between two rounds.
        clock: measures it.

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
        # The lane holds the rounds, and nothing that leads to the module: once nobody has that, the lane ends them.
        self._weights_in_use = weakref.ref(weights)
        self._buckets = list(weights)
        self._average = average
        self._compare_progress = weights.lockstep.comparison("the first of the averaging rounds")
        self._layout_watch = weights.lockstep.layout_watch
        self._interval_s = interval_s
        # The others wait for this rank meanwhile, on the network.
        self._timeout_s = runner.process_group.timeout.total_seconds()
        self._longest_patience_s = self._timeout_s / 4
        self._clock = clock
        self._device = next((bucket.flat.device for bucket in self._buckets), torch.device("cpu"))
        self._handoff = StreamHandoff(self._device)
        self._last_to_stop: int | None = None  # a rank that had not stopped yet at the last round; the lane writes it
        # The lane's: the last load that all ranks have seen, and since when they have seen different numbers of loads.
        self._compared = LoadMark()
        self._apart_since_s: float | None = None
        # Guards everything below. The buckets' snapshots are the training thread's while it is asked for them, and the
        # lane's otherwise.
        self._changed = threading.Condition()
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
            bucket.difference.zero_()  # made here, and so on this thread's stream
        self._handoff.record()
        self._job = runner.lane.submit(self._run, interrupt=self.leave)

    @property
    def outcome(self) -> Outcome | None:
        """How the rounds ended, or None while they go on. Raises RuntimeError where communication failed."""
        return self._job.result() if self._job.is_done() else None

    @property
    def _weights(self) -> WeightBuckets:
        """What the training thread reads and writes."""
        weights = self._weights_in_use()
        assert weights is not None
        return weights

    def after_step(self) -> None:
        """Between two steps, on the training thread: add what was averaged, give a snapshot where one is wanted."""
        with self._changed:
            now_s = self._clock.now()
            self._step_s, self._last_step_at_s = now_s - self._last_step_at_s, now_s
            self._num_steps += 1
            self._serve()

    def weights_loaded(self, names: Collection[str], loads: LoadMark) -> None:
        """Drop what snapshots from before a load would change of the loaded weights; on the training thread."""
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
        """Go on, on the training thread, until all ranks have called this; they may train for long.

        Where one of them wants it, there is a last mean then, and all ranks take it for their weights. A warning names
        a rank that is waited for longer than the group's timeout.

        Args:
            reason: why; the same on all ranks.
            with_mean: whether this rank wants it.
            loading: names of weights that were loaded since the last step.

        Raises:
            CommunicationError: communication failed, or another rank stops for another reason.
        """
        if loading:  # until all have stopped, no rank that has not loaded changes them
            self.weights_loaded(loading, self._loads._replace(num_loads=self._loads.num_loads + 1))
        with self._tracer.span("wait"), self._changed:
            self._vote = replace(self._vote, stops=True, wants_mean=with_mean, reason=reason)
            self._changed.notify_all()
            warn_at_s = self._clock.now() + self._timeout_s
            while self._phase != "over" and not self._job.is_done():  # which it is at once on a lane that has failed
                # Not for ever: a lane that fails before it comes to the rounds notifies nobody.
                self._changed.wait_for(lambda: self._phase in ("asked", "over"), timeout=1.0)
                self._serve()
                if self._clock.now() > warn_at_s and self._last_to_stop is not None:
                    warn_at_s = math.inf
                    self._warn_of_waiting(reason)
            self._serve()
        outcome = self._job.result()
        if outcome.has_mean:
            self._weights.write()
        return outcome

    def _warn_of_waiting(self, reason: Reason) -> None:
        warn_user(
            f"torchbagua: {reason} has waited longer than the timeout of {self._timeout_s:g} s for rank "
            f"{self._last_to_stop}, which still takes part in averaging: it is training, or stands still"
        )

    def leave(self) -> None:
        """End the rounds of all ranks, without waiting for it."""
        with self._changed:
            self._vote = replace(self._vote, leaves=True)
            self._changed.notify_all()

    def pending(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] | None:
        """Return what the weights are still to be given, or None: differences, and snapshots of buffers, by name."""
        with self._changed:
            if self._pending_info is None:
                return None
            self._handoff.wait()
            buffers = self._pending_info.buffers
            copies = self._weights.by_name(DIFFERENCE), self._weights.by_name(buffers.__getitem__, buffers)
            self._handoff.record()
            return copies

    def _serve(self) -> None:
        """Give the weights what was averaged, and where the lane has asked for a snapshot, give it one."""
        self._handoff.wait()
        if self._pending_info is not None:
            self._weights.add(DIFFERENCE, self._pending_info.buffers.__getitem__)
            staleness = self._num_steps - self._pending_info.step
            self._pending_info = None
            now_ns = time.perf_counter_ns()
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
                self._hand_over()
        finally:
            with self._changed:
                self._phase = "over"
                self._changed.notify_all()

    def _await_snapshot(self) -> None:
        with self._changed:
            # 1. The interval, unless this rank stops.
            self._phase = "pause"
            self._wait(self._interval_s, lambda: self._vote.stops)
            self._handoff.record()
            # 2. A snapshot, or word that this rank stops. One that trains answers within a step; one that has not by
            # then evaluates, say, and its last snapshot is sent again.
            self._phase = "asked"
            self._changed.notify_all()
            patience_s = min(max(self._interval_s, 2 * self._step_s, _FIRST_PATIENCE_S), self._longest_patience_s)
            self._wait(patience_s, lambda: self._phase == "ready" or self._vote.stops)
            # 3. One that stops must answer, and does at once: its last snapshot are its last weights.
            self._wait(self._longest_patience_s, lambda: self._phase == "ready" or not self._vote.stops)
            self._phase = "averaging"
            self._handoff.wait()
            if self._snapshot_info.num_rounds < self.num_rounds:
                self._carry_snapshot(DIFFERENCE)

    def _agree(self) -> Outcome:
        with self._changed:
            # A rank has stopped when it has given its last snapshot; it leaves at once.
            gives_up = self._apart_since_s is not None and self._clock.now() - self._apart_since_s > self._timeout_s
            vote = replace(
                self._snapshot_info.vote,
                leaves=self._vote.leaves,
                num_loads=self._snapshot_info.loads.num_loads,
                gives_up=gives_up,
            )
        outcome = count_votes(self._group.world, vote, self._layout_watch, f"averaging round {self.num_rounds}")
        self._last_to_stop = outcome.running_rank
        if outcome.num_loads is not None:
            self._apart_since_s = None
        elif self._apart_since_s is None:
            self._apart_since_s = self._clock.now()
        return outcome

    def _compare_loads(self, num_loads: int) -> frozenset[str]:
        """Return the weights that were loaded so far, if this is the first round after so many loads; else none.

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

    def _hand_over(self) -> None:
        """Leave to the training thread what the flat tensors hold, mean minus snapshot."""
        buffers = {bucket: bucket.snapshot.clone() for bucket in self._buckets if bucket.are_buffers}
        # So that a training thread that takes them does not wait for the network.
        self._group.wait_for_gpu(self._device, f"averaging round {self.num_rounds}")
        with self._changed:
            self._handoff.wait()
            for bucket in self._buckets if self._loaded_since_snapshot else ():
                bucket.clear(bucket.flat, self._loaded_since_snapshot)
            if self._pending_info is None:
                for bucket in self._buckets:
                    bucket.difference, bucket.flat = bucket.flat, bucket.difference
                self._pending_info = PendingInfo(self._snapshot_info.step, buffers)
            else:  # the training thread has not come since the last round
                for bucket in self._buckets:
                    bucket.difference.add_(bucket.flat)
                self._carry_snapshot(FLAT)
            self._handoff.record()

    def _carry_snapshot(self, last_difference: FlatOf) -> None:
        """Bring a snapshot that may be sent again up to this round, as the weights will be when they are given it."""
        for bucket in self._buckets:
            bucket.snapshot.add_(last_difference(bucket))
        self._snapshot_info = replace(self._snapshot_info, num_rounds=self.num_rounds)

    def _wait(self, timeout_s: float, is_done: Callable[[], bool]) -> None:
        """Wait for this, or until the rank leaves."""
        deadline_s = self._clock.now() + timeout_s
        while not (is_done() or self._vote.leaves) and (left_s := deadline_s - self._clock.now()) > 0:
            self._clock.wait(self._changed, left_s)
