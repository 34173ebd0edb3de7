"""Error feedback: the residual of one compression is added to the next tensor that is sent.

Shape suffixes: N elements of a bucket.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from torchbagua.collectives.residuals import Momentum, Residual, StagedSlice, VelocityResidual
from torchbagua.observe.tracer import Tracer
from torchbagua.transport.streams import keep_for_current_stream


class TwoPhaseResiduals:
    """The two residuals of a two-phase mean on one rank (1-bit Adam, Tang et al., arXiv 2102.02888, Algorithm 1).

    The bucket determines which rank owns which chunk, or which shard of a node's sum. When a bucket replaces others,
    every rank therefore expands its part of their residuals to the whole new bucket, with zeros elsewhere. On the first
    run of the bucket, the ranks sum these expanded residuals. The sum is bitwise exact, since all but one of the
    summands are zero.

    Attributes:
        initial: the argument until the first run, then None.
        sent: the residual of what this rank sends: its own values, or a shard of its node's sums.
        mean: the residual of the means of the chunk that this rank owns.
        kept: "sent" and "mean"; with a momentum also "velocity", the velocity of what this rank sends.
    """

    def __init__(
        self,
        device: torch.device,
        initial: Mapping[str, torch.Tensor] | None = None,
        momentum: Momentum | None = None,
    ) -> None:
        self.initial = initial
        self._device = device
        self._momentum = momentum
        self._make(slice(0, 0), slice(0, 0))

    def assign_slices(self, sent: slice, mean: slice) -> None:
        """Set the slice of the bucket that this rank sends, and the slice whose means it computes."""
        # If operations are rebuilt with the same slices, the values stay.
        if (self.sent.bucket_slice, self.mean.bucket_slice) != (sent, mean):
            self._make(sent, mean)

    def _make(self, sent: slice, mean: slice) -> None:
        self.sent, self.mean = Residual(sent, self._device), Residual(mean, self._device)
        self.kept: dict[str, StagedSlice] = {"sent": self.sent, "mean": self.mean}
        if self._momentum is not None:
            self.sent = with_velocity = VelocityResidual(sent, self._device, self._momentum)
            self.kept |= {"sent": self.sent, "velocity": with_velocity.velocity}

    def load_whole(self, whole: Mapping[str, torch.Tensor]) -> None:
        """Set the values to this rank's slices of the values of the whole bucket."""
        for name, kept in self.kept.items():
            kept.values.copy_(whole[name][kept.bucket_slice])
        for tensor in (self.initial or {}).values():
            keep_for_current_stream(tensor)  # created on the training thread's stream, read on this one
        self.initial = None

    def clear(self, parts: Iterable[slice]) -> None:
        """Set these slices of the bucket to zero. Do not call this while the lane reduces the bucket."""
        for part in parts:
            for tensor in (self.initial or {}).values():
                tensor[part] = 0
            for kept in self.kept.values():
                kept.clear(part)

    def expand(self, part: slice) -> list[torch.Tensor]:
        """Return this rank's values for `part` of the bucket, in the order of `kept`."""
        if self.initial is not None:
            return [self.initial[name][part] for name in self.kept]
        return [kept.expand(part) for kept in self.kept.values()]

    def continue_from_staged(self, parts: Sequence[slice]) -> None:
        """Prepare both residuals, see `Residual.continue_from_staged`."""
        self.sent.continue_from_staged(parts)
        self.mean.continue_from_staged(parts)

    def unstage(self, is_used_N: torch.Tensor) -> None:
        """Unstage all values, see `StagedSlice.unstage`."""
        for kept in self.kept.values():
            kept.unstage(is_used_N)

    def commit(self, parts: Sequence[slice] | None = None) -> None:
        """Commit all values, see `StagedSlice.commit`."""
        for kept in self.kept.values():
            kept.commit(parts)

    def report(self, tracer: Tracer, bucket: str) -> None:
        """Report the norms of this rank's staged residuals to observers, if one of them samples this step."""
        if not tracer.samples:
            return
        everything = slice(None)

        def norms() -> dict[str, torch.Tensor]:
            named = {"residual of what is sent": self.sent, "residual of the mean": self.mean}
            return {name: residual.staged(everything).norm() for name, residual in named.items()}

        tracer.measure(norms, bucket)
