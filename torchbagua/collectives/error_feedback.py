"""Error feedback: what compression has left out of what was sent is added to what is sent next.

Shape suffixes: N elements of a bucket, L elements of a slice of it, W wire bytes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchbagua.compressors import Compressor, WireLayout
from torchbagua.tracer import Tracer


class Residual:
    """What compression has left out of a slice of a bucket, in float32.

    What is left out is staged at first, and is the residual once it is committed: a step that is not taken leaves no
    trace. Memory: 8 bytes an element of the slice, and 4 more where what was encoded is encoded again before a commit.

    Attributes:
        bucket_slice: the slice.
        values: [L], the residual.
    """

    def __init__(self, bucket_slice: slice, device: torch.device) -> None:
        self.bucket_slice = bucket_slice
        self.values = torch.zeros(bucket_slice.stop - bucket_slice.start, device=device)
        self._staged = torch.zeros_like(self.values)
        self._is_staged = False
        self._continued: torch.Tensor | None = None

    def encode(
        self, x_L: torch.Tensor, compressor: Compressor, layout: WireLayout, wire_W: torch.Tensor, within: slice
    ) -> None:
        """Encode `x_L` with the residual `within` the slice added, and stage what the wire leaves out of it."""
        added = self.values if self._continued is None else self._continued
        compressor.encode_feedback(x_L, added[within], layout, wire_W, self._staged[within])
        self._is_staged = True

    def continue_from_staged(self, parts: Sequence[slice]) -> None:
        """Prepare to encode what may have in it what was encoded last, in these slices of the bucket.

        There the residual has been added already, and what is staged has been left out since.
        """
        self._continued = None
        if self._is_staged and parts:
            self._continued = self.values.clone()
            for part in parts:
                own = _overlap(part, self.bucket_slice)
                self._continued[own] = self._staged[own]

    def staged(self, within: slice) -> torch.Tensor:
        """Return what is staged `within` the slice."""
        return self._staged[within]

    def commit(self, parts: Sequence[slice] | None = None) -> None:
        """Take what is staged of these slices of the bucket for the residual, by default of all."""
        if not self._is_staged:
            return
        if parts is not None:  # the rest may be committed later
            for part in parts:
                own = _overlap(part, self.bucket_slice)
                self.values[own] = self._staged[own]
            return
        self.values, self._staged = self._staged, self.values
        self._is_staged = False
        self._continued = None

    def expand(self, part: slice) -> torch.Tensor:
        """Return what this rank holds of `part` of the bucket, with zeros where it holds nothing."""
        values = self.values.new_zeros(part.stop - part.start)
        values[_overlap(self.bucket_slice, part)] = self.values[_overlap(part, self.bucket_slice)]
        return values


class ResidualPair(NamedTuple):
    """Both residuals of a bucket, [N] float32 each: all of them, or what one rank holds, with zeros elsewhere."""

    sent: torch.Tensor
    mean: torch.Tensor


class TwoPhaseResiduals:
    """The two residuals of a two-phase mean on one rank (1-bit Adam, Tang et al., arXiv 2102.02888, Algorithm 1).

    Which rank owns which chunk of a bucket, or which shard of what its node sends, changes with the bucket. So where a
    bucket takes over from others, every rank expands what it holds of those to the new one, with zeros elsewhere. When
    this runs for the first time the ranks sum that: bit for bit, since all but one of the summands are zero.

    Args:
        device: of the bucket.
        initial: what this rank holds for the bucket; None on all ranks where no parameter has been sent before.

    Attributes:
        initial: the same until the first run, then None.
        sent: of what this rank sends: its own values, or a shard of its node's sums.
        mean: of the means of the chunk that it owns.
    """

    def __init__(self, device: torch.device, initial: ResidualPair | None = None) -> None:
        self.initial = initial
        nothing = slice(0, 0)
        self.sent, self.mean = Residual(nothing, device), Residual(nothing, device)

    def assign_slices(self, sent: slice, mean: slice) -> None:
        """Say which slices of the bucket this rank sends, and forms the means of."""
        # The same where operations are built again: what is kept stays then.
        if (self.sent.bucket_slice, self.mean.bucket_slice) != (sent, mean):
            device = self.sent.values.device
            self.sent, self.mean = Residual(sent, device), Residual(mean, device)

    def load_whole(self, whole: ResidualPair) -> None:
        """Start from the residuals of the whole bucket, of which the own slices are taken."""
        self.sent.values.copy_(whole.sent[self.sent.bucket_slice])
        self.mean.values.copy_(whole.mean[self.mean.bucket_slice])
        for tensor in self.initial or ():
            if tensor.is_cuda:  # made on the training thread's stream, and read until now on this one
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        self.initial = None

    def expand(self, part: slice) -> ResidualPair:
        """Return what this rank holds of `part` of the bucket."""
        if self.initial is not None:
            return ResidualPair(self.initial.sent[part], self.initial.mean[part])
        return ResidualPair(self.sent.expand(part), self.mean.expand(part))

    def continue_from_staged(self, parts: Sequence[slice]) -> None:
        """Prepare both, see `Residual.continue_from_staged`."""
        self.sent.continue_from_staged(parts)
        self.mean.continue_from_staged(parts)

    def commit(self, parts: Sequence[slice] | None = None) -> None:
        """Commit both, see `Residual.commit`."""
        self.sent.commit(parts)
        self.mean.commit(parts)


def _overlap(part: slice, elements: slice) -> slice:
    """Return the slice of a tensor of `elements` that `part` covers."""
    start = max(part.start, elements.start)
    return slice(start - elements.start, max(min(part.stop, elements.stop), start) - elements.start)


def tell_residuals(tracer: Tracer, bucket: str, residuals: TwoPhaseResiduals) -> None:
    """Tell observers the norms of the residuals that are staged on this rank."""
    everything = slice(None)

    def norms() -> dict[str, torch.Tensor]:
        named = {"residual of what is sent": residuals.sent, "residual of the mean": residuals.mean}
        return {name: residual.staged(everything).norm() for name, residual in named.items()}

    tracer.measure(norms, bucket)
