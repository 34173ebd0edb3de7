"""A round of DiLoCo in flight: from the snapshots to the outer optimizer's step and the update of the weights."""

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
    """Averages outer gradients on the lane, steps the outer optimizer on the means, and updates the weights.

    Without overlap, the weights are set to the shadow weights as soon as the outer optimizer has stepped. With overlap,
    the difference between the new shadow weights and the snapshot is added to the weights later.

    Args:
        rounds: counts steps and rounds, and owns the weights.
        shadow: the shadow weights.
        residuals: the residuals of the outer gradients.
        fragments: determines which buckets belong to the same fragment.
        tracer: is notified of each applied round.
        overlaps: whether training continues while a round is in flight.

    Attributes:
        shadow: the shadow weights.
        num_dropped: the number of dropped rounds.
        snapshot_step: the number of steps before the last snapshot.
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
        # The buckets of the round that is in flight, or received but not yet applied.
        self._buckets: Sequence[WeightBucket] = []
        self._has_differences = False

    @property
    def is_in_flight(self) -> bool:
        """Whether a round is in flight, or received but not yet applied to the weights."""
        return self._job is not None or self._has_differences

    def start(self, due: Sequence[WeightBucket]) -> None:
        """Start the averaging of outer gradients and of buffers on the lane."""
        snapshot = SNAPSHOT if self._overlaps else FLAT
        for bucket in due:  # bucket by bucket, while each is in the caches
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
        """Wait for the means, step the outer optimizer on them, and write the weights or the pending differences."""
        if self._job is None:
            return
        self._job.finish(reads=True)
        self._job = None
        # The result is the same on all ranks, because the means are.
        if not all(map(self._is_valid, self._buckets)):
            self._drop_round()
            return
        self._residuals.commit(self._buckets)
        self.shadow.step([bucket for bucket in self._buckets if not bucket.are_buffers])
        if not self._overlaps:
            self._weights.write(self._new_values, self._buckets)
            self._report_applied()
            return
        for bucket in self._buckets:
            bucket.subtract(self._new_values(bucket), bucket.snapshot, out=self._difference(bucket))
        self._has_differences = True

    def apply(self) -> None:
        """Wait for the round in flight, and apply it to the weights."""
        self.receive()
        if self._has_differences:
            self._weights.add(self._difference, SNAPSHOT, self._buckets)
            self._has_differences = False
            self._report_applied()

    def drop(self, names: Collection[str]) -> None:
        """If any weights were loaded, receive the round in flight and drop its differences for these weights."""
        if names:
            self.receive()
        if self._has_differences:
            for bucket in self._buckets:
                bucket.clear(self._difference(bucket), names)

    def abandon(self) -> None:
        """Wait for the round in flight, but do not apply it to the weights."""
        self.receive()
        self._has_differences = False

    def state_dict(self) -> dict[str, Any]:
        """Return the differences that are not yet applied, and their step and fragment."""
        self.receive()
        return {
            "snapshot_step": self.snapshot_step,
            "fragment": self._fragments.of_bucket(self._buckets[0]) if self._buckets else 0,
            "has_differences": self._has_differences,
            "differences": self._weights.by_name(self._difference),
            "buffer_snapshots": self._weights.by_name(SNAPSHOT, self._weights.of_buffers),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state that `state_dict` returned. The state of a single rank contains no tensors."""
        if state["differences"]:
            self._weights.load_by_name(self._difference, state["differences"])
            self._weights.load_by_name(SNAPSHOT, state["buffer_snapshots"], self._weights.of_buffers)
        self.snapshot_step, self._has_differences = state["snapshot_step"], bool(state["has_differences"])
        members = [bucket for bucket in self._weights if self._fragments.of_bucket(bucket) == state["fragment"]]
        self._buckets = members if self._has_differences else []

    def _new_values(self, bucket: WeightBucket) -> torch.Tensor:
        return bucket.flat if bucket.are_buffers else self.shadow[bucket].theta

    def _difference(self, bucket: WeightBucket) -> torch.Tensor:
        return bucket.difference if bucket.are_buffers else self.shadow[bucket].gradient.flat

    def _is_valid(self, bucket: WeightBucket) -> bool:
        flat = bucket.flat if bucket.are_buffers else self.shadow[bucket].gradient.flat
        if not len(flat):
            return True
        low, high = flat.aminmax()  # on CPUs ten times faster than isfinite().all(); both are NaN if an element is NaN
        # A buffer may legitimately contain -inf, such as an attention mask.
        return not bool(low.isnan()) if bucket.are_buffers else bool(low.isfinite() & high.isfinite())

    def _drop_round(self) -> None:
        self.num_dropped += 1
        if self.num_dropped == 1:
            warn_user(
                f"torchbagua: the round after {self.snapshot_step} steps is dropped on all ranks, because a rank's "
                "weights contain NaN or Inf; the number of dropped rounds is reported at the end"
            )

    def _report_applied(self) -> None:
        tracer = self._tracer
        values = {
            "rounds": self._rounds.num_rounds,
            "fragment": self._fragments.of_bucket(self._buckets[0]),
            "staleness in steps": self._rounds.step - self.snapshot_step,
        }
        now = tracer.now()
        tracer.tell("apply", now, now, Details(values=values))
