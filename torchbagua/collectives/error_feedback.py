"""Error feedback: the residual of one compression is added to the next tensor that is sent.

Shape suffixes: N elements of a bucket.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from torchbagua.codecs.base import Identity, TensorSpec
from torchbagua.collectives.mean import Mean, OverlappingMean, TwoPhaseMean
from torchbagua.collectives.residuals import Momentum, Residual, StagedSlice, VelocityResidual
from torchbagua.observe.tracer import Tracer
from torchbagua.transport.communicator import Communicator
from torchbagua.transport.streams import keep_for_current_stream


class TwoPhaseResiduals:
    """The two residuals of a two-phase mean on one rank (1-bit Adam, Tang et al., arXiv 2102.02888, Algorithm 1).

    The bucket determines which rank owns which chunk, or which shard of a node's sum. When a bucket replaces others,
    every rank therefore expands its part of their residuals to the whole new bucket, with zeros elsewhere. On the first
    run of the bucket, the ranks sum these expanded residuals. The sum is bitwise exact, since all but one of the
    summands are zero.

    Args:
        device: the device of the bucket.
        initial: this rank's values for the bucket, by the names in `kept`, [N] float32 each; None on all ranks if no
            parameter has been sent before.
        momentum: the momentum of the sent values.

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
        """Report the norms of this rank's staged residuals to observers."""
        everything = slice(None)

        def norms() -> dict[str, torch.Tensor]:
            named = {"residual of what is sent": self.sent, "residual of the mean": self.mean}
            return {name: residual.staged(everything).norm() for name, residual in named.items()}

        tracer.measure(norms, bucket)


class RedistributingMean(OverlappingMean):
    """A mean that first redistributes the residuals, if its bucket replaces others.

    Args:
        mean: the mean to compute.
        residuals: the residuals of the bucket.
        senders: the ranks among which the sent tensor is divided, those of a node; None if each rank sends all of it.
        owners: the ranks among which the means are divided.
        spec: the bucket's tensor.
    """

    def __init__(
        self,
        mean: Mean,
        residuals: TwoPhaseResiduals,
        senders: Communicator | None,
        owners: Communicator,
        spec: TensorSpec,
    ) -> None:
        self._mean = mean
        self._residuals = residuals
        self._senders = senders
        self._owners = owners
        self._spec = spec

    def may_begin(self) -> bool:
        """Return whether it can begin without blocking: the mean can, and no residuals wait for redistribution."""
        mean = self._mean
        return self._residuals.initial is None and isinstance(mean, OverlappingMean) and mean.may_begin()

    def steps(self, x_N: torch.Tensor, out_N: torch.Tensor | None = None) -> Iterator[None]:
        """Compute the mean, and yield when the wrapped mean yields."""
        if (initial := self._residuals.initial) is not None:
            among = {name: self._owners if name == "mean" else self._senders for name in initial}
            self._residuals.load_whole({name: self._sum_over(among[name], x_N) for name, x_N in initial.items()})
        if isinstance(self._mean, OverlappingMean):
            yield from self._mean.steps(x_N, out_N)
        else:
            self._mean(x_N, out_N)

    def _sum_over(self, communicator: Communicator | None, x_N: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks. All ranks but one have zeros, so the sum is bitwise that rank's values."""
        if communicator is None:
            return x_N
        total_N = x_N.clone()  # a failure leaves `x_N` unchanged
        TwoPhaseMean(communicator, Identity(), self._spec, 1.0)(total_N)
        return total_N
