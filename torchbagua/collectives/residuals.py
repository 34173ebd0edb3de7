"""What one rank keeps from one mean to the next for a slice of a bucket: residuals, and the momentum of what it sends.

Shape suffixes: N elements of a bucket, L of a slice of it, W wire bytes.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from torchbagua.codecs.base import Compressor
from torchbagua.codecs.blocks import WireLayout

_PIECE_ELEMENTS = 1 << 16


class StagedSlice:
    """Values for a slice of a bucket, in float32, and what is staged to replace them.

    What is staged is kept once it is committed: a step that is not taken leaves no trace.

    Attributes:
        bucket_slice: the slice.
        values: [L], what is kept.
    """

    def __init__(self, bucket_slice: slice, device: torch.device) -> None:
        self.bucket_slice = bucket_slice
        self.values = torch.zeros(bucket_slice.stop - bucket_slice.start, device=device)
        self._staged = torch.zeros_like(self.values)
        self._is_staged = False

    def staged(self, within: slice) -> torch.Tensor:
        """Return what is staged `within` the slice."""
        return self._staged[within]

    def stage(self, within: slice) -> torch.Tensor:
        """Return where to write what is to be staged `within` the slice."""
        self._is_staged = True
        return self._staged[within]

    def commit(self, parts: Sequence[slice] | None = None) -> None:
        """Keep what is staged of these slices of the bucket, by default of all."""
        if not self._is_staged:
            return
        if parts is not None:  # the rest may be committed later
            for part in parts:
                own = overlap(part, self.bucket_slice)
                self.values[own] = self._staged[own]
            return
        self.values, self._staged = self._staged, self.values
        self._is_staged = False

    def unstage(self, is_used_N: torch.Tensor) -> None:
        """Stage what is kept of those elements of the bucket for which `is_used_N`, [N] bool, is False."""
        if self._is_staged:
            torch.where(is_used_N[self.bucket_slice], self._staged, self.values, out=self._staged)

    def clear(self, part: slice) -> None:
        """Keep zeros of `part` of the bucket, whatever is staged of it."""
        own = overlap(part, self.bucket_slice)
        self.values[own] = 0
        self._staged[own] = 0

    def expand(self, part: slice) -> torch.Tensor:
        """Return what this rank holds of `part` of the bucket, with zeros where it holds nothing."""
        values = self.values.new_zeros(part.stop - part.start)
        values[overlap(self.bucket_slice, part)] = self.values[overlap(part, self.bucket_slice)]
        return values


class Residual(StagedSlice):
    """What compression has left out of a slice of a bucket, in float32.

    Memory: 8 bytes an element of the slice, and 4 more where what was encoded is encoded again before a commit.
    """

    def __init__(self, bucket_slice: slice, device: torch.device) -> None:
        super().__init__(bucket_slice, device)
        self._continued: torch.Tensor | None = None

    def encode(
        self, x_L: torch.Tensor, compressor: Compressor, layout: WireLayout, wire_W: torch.Tensor, within: slice
    ) -> None:
        """Encode `x_L` with the residual `within` the slice added, and stage what the wire leaves out of it."""
        compressor.encode_feedback(x_L, self.added(within), layout, wire_W, self.stage(within))

    def added(self, within: slice) -> torch.Tensor:
        """Return what is to be added `within` the slice to what is encoded."""
        return (self.values if self._continued is None else self._continued)[within]

    def continue_from_staged(self, parts: Sequence[slice]) -> None:
        """Prepare to encode what may have in it what was encoded last, in these slices of the bucket.

        There the residual has been added already, and what is staged has been left out since.
        """
        self._continued = None
        if self._is_staged and parts:
            self._continued = self.values.clone()
            for part in parts:
                own = overlap(part, self.bucket_slice)
                self._continued[own] = self._staged[own]

    def commit(self, parts: Sequence[slice] | None = None) -> None:
        super().commit(parts)
        if parts is None:
            self._continued = None


class Momentum(NamedTuple):
    """Momentum correction of what a rank sends (Deep Gradient Compression, Lin et al., arXiv 1712.01887, section 3.1).

    Attributes:
        factor: of the last velocity.
        has_masking: whether the velocity of an element that is sent becomes zero (section 3.2).
    """

    factor: float
    has_masking: bool


class VelocityResidual(Residual):
    """A residual that adds up velocities, u = m u + g, in place of gradients g.

    An element that waits so gets the momentum of every step that it waits. Memory: 8 bytes an element more.

    Attributes:
        velocity: u.
    """

    def __init__(self, bucket_slice: slice, device: torch.device, momentum: Momentum) -> None:
        super().__init__(bucket_slice, device)
        self.velocity = StagedSlice(bucket_slice, device)
        self._momentum = momentum

    def encode(
        self, x_L: torch.Tensor, compressor: Compressor, layout: WireLayout, wire_W: torch.Tensor, within: slice
    ) -> None:
        """Encode the velocity after the gradient `x_L`, with the residual, and stage both."""
        velocity_L, kept_L = self.velocity.stage(within), self.values[within]
        for old, new, x in _pieces(self.velocity.values[within], velocity_L, x_L):
            x.copy_(torch.mul(old, self._momentum.factor, out=new).add_(x))
        super().encode(x_L, compressor, layout, wire_W, within)
        if self._momentum.has_masking:
            # What decodes to zero leaves all of it out, which is the sum that `encode_feedback` forms, to the bit.
            for new, kept, left_out in _pieces(velocity_L, kept_L, self.staged(within)):
                new.mul_(torch.eq(new + kept, left_out, out=torch.empty_like(new)))

    def continue_from_staged(self, parts: Sequence[slice]) -> None:
        """Raise RuntimeError where what was encoded last is in what comes: it holds velocities and no gradients."""
        if self._is_staged and parts:
            raise RuntimeError(
                "with momentum, a step must have one synchronised backward pass, got another one before the step; "
                "accumulate gradients under ddp.no_sync()"
            )


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the same pieces of tensors of one length, which fit into a core's cache; on a GPU the whole."""
    length = _PIECE_ELEMENTS if tensors[0].device.type == "cpu" else max(1, len(tensors[0]))
    return zip(*(tensor.split(length) for tensor in tensors), strict=True)


def overlap(part: slice, elements: slice) -> slice:
    """Return the slice of a tensor of `elements` that `part` covers."""
    start = max(part.start, elements.start)
    return slice(start - elements.start, max(min(part.stop, elements.stop), start) - elements.start)
