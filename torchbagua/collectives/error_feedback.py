"""Error feedback: what compression has left out of what was sent is added to what is sent next.

Shape suffixes: N elements of a bucket.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from torchbagua.collectives.residuals import Momentum, Residual, StagedSlice, VelocityResidual
from torchbagua.observe.tracer import Tracer
from torchbagua.transport.streams import keep_for_current_stream


class TwoPhaseResiduals:
    """The two residuals of a two-phase mean on one rank (1-bit Adam, Tang et al., arXiv 2102.02888, Algorithm 1).

    Which rank owns which chunk of a bucket, or which shard of what its node sends, changes with the bucket. So where a
    bucket takes over from others, every rank expands what it holds of those to the new one, with zeros elsewhere. When
    this runs for the first time the ranks sum that: bit for bit, since all but one of the summands are zero.

    Args:
        device: of the bucket.
        initial: by the names of `kept`, what this rank holds for the bucket, [N] float32 each; None on all ranks where
            no parameter has been sent before.
        momentum: of what is sent.

    Attributes:
        initial: the same until the first run, then None.
        sent: of what this rank sends: its own values, or a shard of its node's sums.
        mean: of the means of the chunk that it owns.
        kept: "sent" and "mean", and with a momentum "velocity", that of what this rank sends.
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
        """Say which slices of the bucket this rank sends, and forms the means of."""
        # The same where operations are built again: what is kept stays then.
        if (self.sent.bucket_slice, self.mean.bucket_slice) != (sent, mean):
            self._make(sent, mean)

    def _make(self, sent: slice, mean: slice) -> None:
        self.sent, self.mean = Residual(sent, self._device), Residual(mean, self._device)
        self.kept: dict[str, StagedSlice] = {"sent": self.sent, "mean": self.mean}
        if self._momentum is not None:
            self.sent = with_velocity = VelocityResidual(sent, self._device, self._momentum)
            self.kept |= {"sent": self.sent, "velocity": with_velocity.velocity}

    def load_whole(self, whole: Mapping[str, torch.Tensor]) -> None:
        """Start from what is kept for the whole bucket, of which the own slices are taken."""
        for name, kept in self.kept.items():
            kept.values.copy_(whole[name][kept.bucket_slice])
        for tensor in (self.initial or {}).values():
            keep_for_current_stream(tensor)  # made on the training thread's stream, and read until now on this one
        self.initial = None

    def clear(self, parts: Iterable[slice]) -> None:
        """Keep zeros of these slices of the bucket. Not while the bucket runs."""
        for part in parts:
            for tensor in (self.initial or {}).values():
                tensor[part] = 0
            for kept in self.kept.values():
                kept.clear(part)

    def expand(self, part: slice) -> list[torch.Tensor]:
        """Return what this rank holds of `part` of the bucket, in the order of `kept`."""
        if self.initial is not None:
            return [self.initial[name][part] for name in self.kept]
        return [kept.expand(part) for kept in self.kept.values()]

    def continue_from_staged(self, parts: Sequence[slice]) -> None:
        """Prepare both, see `Residual.continue_from_staged`."""
        self.sent.continue_from_staged(parts)
        self.mean.continue_from_staged(parts)

    def unstage(self, is_used_N: torch.Tensor) -> None:
        """Unstage all, see `StagedSlice.unstage`."""
        for kept in self.kept.values():
            kept.unstage(is_used_N)

    def commit(self, parts: Sequence[slice] | None = None) -> None:
        """Commit all, see `StagedSlice.commit`."""
        for kept in self.kept.values():
            kept.commit(parts)


def tell_residuals(tracer: Tracer, bucket: str, residuals: TwoPhaseResiduals) -> None:
    """Tell observers the norms of the residuals that are staged on this rank."""
    everything = slice(None)

    def norms() -> dict[str, torch.Tensor]:
        named = {"residual of what is sent": residuals.sent, "residual of the mean": residuals.mean}
        return {name: residual.staged(everything).norm() for name, residual in named.items()}

    tracer.measure(norms, bucket)
