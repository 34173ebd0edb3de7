"""The round of DiLoCo that is under way: from snapshots to the step of the outer optimizer, and to the weights."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from torchbagua._warnings import warn_user
from torchbagua.algorithms.weights.fragments import Fragments
from torchbagua.algorithms.weights.outer_residuals import OuterResiduals
from torchbagua.algorithms.weights.shadow_weights import ShadowWeights
from torchbagua.algorithms.weights.synchronous_rounds import SynchronousRounds
from torchbagua.observe.events import Details
from torchbagua.observe.tracer import Tracer
from torchbagua.runtime.job import Job
from torchbagua.runtime.weight_bucket import FLAT, SNAPSHOT, WeightBucket

IN_FLIGHT = ("snapshot_step", "fragment", "has_differences", "differences", "buffer_snapshots")
"""The keys of `OuterRound.state_dict`."""


class OuterRound:
    """Has the lane average outer gradients, the outer optimizer step by the means, and the weights follow.

    Without overlap the weights become the shadow weights as soon as these have been stepped. With overlap the change
    since the snapshot is added to the weights, later.

    Args:
        rounds: counts steps and rounds, and has the weights.
        shadow: the shadow weights.
        residuals: of what is sent.
        fragments: says which buckets go together.
        tracer: is notified of each applied round.
        overlaps: whether training goes on while a round is under way.

    Attributes:
        shadow: the shadow weights.
        num_dropped: rounds that were dropped, of all rounds.
        snapshot_step: after how many steps the last snapshot was taken.
    """

    def __init__(
        self,
        rounds: SynchronousRounds,
        shadow: ShadowWeights,
        residuals: OuterResiduals,
        fragments: Fragments,
        tracer: Tracer,
        *,
        overlaps: bool,
    ) -> None:
        self.shadow = shadow
        self.num_dropped = 0
        self.snapshot_step = 0
        self._rounds = rounds
        self._weights = rounds.weights
        self._residuals = residuals
        self._fragments = fragments
        self._tracer = tracer
        self._overlaps = overlaps
        self._job: Job[None] | None = None
        # Of the round that is under way, or received and still to be added.
        self._buckets: Sequence[WeightBucket] = []
        self._has_differences = False

    @property
    def is_in_flight(self) -> bool:
        """Whether a round is under way, or received and still to be added to the weights."""
        return self._job is not None or self._has_differences

    def start(self, due: Sequence[WeightBucket]) -> None:
        """Have the lane form the means of outer gradients, and of buffers."""
        snapshot = SNAPSHOT if self._overlaps else FLAT
        for bucket in due:  # one by one, while each is in the caches
            self._weights.read(snapshot, [bucket])
            if not bucket.are_buffers:
                shadow = self.shadow[bucket]
                torch.sub(shadow.theta, snapshot(bucket), out=shadow.gradient.flat)
            elif self._overlaps:
                bucket.flat.copy_(bucket.snapshot)
        averaged = [bucket if bucket.are_buffers else self.shadow[bucket].gradient for bucket in due]

        def average() -> None:
            for bucket in averaged:
                bucket.run()

        self._job = self._rounds.start(average)
        self._buckets, self.snapshot_step = due, self._rounds.step

    def receive(self) -> None:
        """Wait for the means and have the outer optimizer step by them; then write the weights, or what to add."""
        if self._job is None:
            return
        self._job.result()
        self._job = None
        # The same on all ranks, since the means are.
        if not all(map(self._is_sound, self._buckets)):
            self._drop_round()
            return
        self._residuals.commit(self._buckets)
        self.shadow.step([bucket for bucket in self._buckets if not bucket.are_buffers])
        if not self._overlaps:
            self._weights.write(self._new_values, self._buckets)
            self._tell_applied()
            return
        for bucket in self._buckets:
            bucket.subtract(self._new_values(bucket), bucket.snapshot, out=self._difference(bucket))
        self._has_differences = True

    def apply(self) -> None:
        """Wait for the round in flight, and add what it changes to the weights."""
        self.receive()
        if self._has_differences:
            self._weights.add(self._difference, SNAPSHOT, self._buckets)
            self._has_differences = False
            self._tell_applied()

    def drop(self, names: Collection[str]) -> None:
        """Receive the round in flight, if any of these weights has been loaded, and change none of them by it."""
        if names:
            self.receive()
        if self._has_differences:
            for bucket in self._buckets:
                bucket.clear(self._difference(bucket), names)

    def abandon(self) -> None:
        """Wait for the round in flight, and add nothing of it to the weights."""
        self.receive()
        self._has_differences = False

    def state_dict(self) -> dict[str, Any]:
        """Return what is still to be added to the weights, and when and of which fragment it was."""
        self.receive()
        return {
            "snapshot_step": self.snapshot_step,
            "fragment": self._fragments.of_bucket(self._buckets[0]) if self._buckets else 0,
            "has_differences": self._has_differences,
            "differences": self._weights.by_name(self._difference),
            "buffer_snapshots": self._weights.by_name(SNAPSHOT, self._weights.of_buffers),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned. A single rank has saved no tensors."""
        if state["differences"]:
            self._weights.load_by_name(self._difference, state["differences"])
            self._weights.load_by_name(SNAPSHOT, state["buffer_snapshots"], self._weights.of_buffers)
        self.snapshot_step, self._has_differences = state["snapshot_step"], bool(state["has_differences"])
        every = [bucket for bucket in self._weights if self._fragments.of_bucket(bucket) == state["fragment"]]
        self._buckets = every if self._has_differences else []

    def _new_values(self, bucket: WeightBucket) -> torch.Tensor:
        return bucket.flat if bucket.are_buffers else self.shadow[bucket].theta

    def _difference(self, bucket: WeightBucket) -> torch.Tensor:
        return bucket.difference if bucket.are_buffers else self.shadow[bucket].gradient.flat

    def _is_sound(self, bucket: WeightBucket) -> bool:
        flat = bucket.flat if bucket.are_buffers else self.shadow[bucket].gradient.flat
        if not len(flat):
            return True
        low, high = flat.aminmax()  # on CPUs ten times faster than isfinite().all(); NaN is both
        # A buffer may well hold -inf, a mask of attention say.
        return not bool(low.isnan()) if bucket.are_buffers else bool(low.isfinite() & high.isfinite())

    def _drop_round(self) -> None:
        self.num_dropped += 1
        if self.num_dropped == 1:
            warn_user(
                f"torchbagua: the round after {self.snapshot_step} steps is dropped on all ranks, since a rank's "
                "weights hold NaN or Inf; if that happens again, nobody will say so"
            )

    def _tell_applied(self) -> None:
        tracer = self._tracer
        values = {
            "rounds": self._rounds.num_rounds,
            "fragment": self._fragments.of_bucket(self._buckets[0]),
            "staleness in steps": self._rounds.step - self.snapshot_step,
        }
        now = tracer.now()
        tracer.tell("apply", now, now, Details(values=values))
