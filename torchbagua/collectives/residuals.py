"""State of one rank between means, for a slice of a bucket: residuals, and the momentum of the values that it sends.

Shape suffixes: N elements of a bucket, L of a slice of it, W wire bytes.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from torchbagua.codecs.base import Compressor, WireLayout

_PIECE_ELEMENTS = 1 << 16


class StagedSlice:
    """Values for a slice of a bucket, in float32, and the staged values that replace them.

    A commit makes the staged values current. A step that the optimizer skips leaves no trace.

    Attributes:
        bucket_slice: the slice.
        values: [L], the committed values.
    """

    def __init__(self, bucket_slice: slice, device: torch.device) -> None:
        self.bucket_slice = bucket_slice
        self.values = torch.zeros(bucket_slice.stop - bucket_slice.start, device=device)
        self._staged = torch.zeros_like(self.values)
        self._is_staged = False

    def staged(self, within: slice) -> torch.Tensor:
        """Return the staged values `within` the slice."""
        return self._staged[within]

    def stage(self, within: slice) -> torch.Tensor:
        """Return the buffer into which to write staged values `within` the slice."""
        self._is_staged = True
        return self._staged[within]

    def commit(self, parts: Sequence[slice] | None = None) -> None:
        """Commit the staged values of these slices of the bucket, by default of the whole slice."""
        if not self._is_staged:
            return
        if parts is not None:  # other parts may be committed later
            for part in parts:
                own = overlap(part, self.bucket_slice)
                self.values[own] = self._staged[own]
            return
        self.values, self._staged = self._staged, self.values
        self._is_staged = False

    def unstage(self, is_used_N: torch.Tensor) -> None:
        """Stage the committed values of those elements of the bucket for which `is_used_N`, [N] bool, is False."""
        if self._is_staged:
            torch.where(is_used_N[self.bucket_slice], self._staged, self.values, out=self._staged)

    def clear(self, part: slice) -> None:
        """Set `part` of the bucket to zero, both the committed and the staged values."""
        own = overlap(part, self.bucket_slice)
        self.values[own] = 0
        self._staged[own] = 0

    def expand(self, part: slice) -> torch.Tensor:
        """Return this rank's values for `part` of the bucket, with zeros outside its slice."""
        values = self.values.new_zeros(part.stop - part.start)
        values[overlap(self.bucket_slice, part)] = self.values[overlap(part, self.bucket_slice)]
        return values


class Residual(StagedSlice):
    """The residual of a slice of a bucket, in float32.

    Memory: 8 bytes per element of the slice, and 4 more if encoded values are encoded again before a commit.
    """

    def __init__(self, bucket_slice: slice, device: torch.device) -> None:
        super().__init__(bucket_slice, device)
        self._continued: torch.Tensor | None = None

    def encode(
        self, x_L: torch.Tensor, compressor: Compressor, layout: WireLayout, wire_W: torch.Tensor, within: slice
    ) -> None:
        """Encode `x_L` plus the residual `within` the slice, and stage the new residual."""
        compressor.encode_feedback(x_L, self.added(within), layout, wire_W, self.stage(within))

    def added(self, within: slice) -> torch.Tensor:
        """Return the values to add to the encoded tensor `within` the slice."""
        return (self.values if self._continued is None else self._continued)[within]

    def continue_from_staged(self, parts: Sequence[slice]) -> None:
        """Prepare to encode values that may contain the last encoded values, in these slices of the bucket.

        There, the residual has already been added, and the staged values are the residual since.
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
    """Momentum correction of sent values (Deep Gradient Compression, Lin et al., arXiv 1712.01887, section 3.1).

    Attributes:
        factor: the factor of the last velocity.
        has_masking: whether the velocity of a sent element becomes zero (section 3.2).
    """

    factor: float
    has_masking: bool


class VelocityResidual(Residual):
    """A residual that accumulates velocities, u = m u + g, instead of gradients g.

    An element that is not sent for several steps therefore gets the momentum of each of these steps.

    Memory: 8 more bytes per element.

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
        """Encode the velocity after the gradient `x_L`, plus the residual, and stage both."""
        velocity_L, kept_L = self.velocity.stage(within), self.values[within]
        for old, new, x in _pieces(self.velocity.values[within], velocity_L, x_L):
            x.copy_(torch.mul(old, self._momentum.factor, out=new).add_(x))
        super().encode(x_L, compressor, layout, wire_W, within)
        if self._momentum.has_masking:
            # If an element decodes to zero, its residual is bitwise equal to the sum that `encode_feedback` computes.
            for new, kept, residual in _pieces(velocity_L, kept_L, self.staged(within)):
                new.mul_(torch.eq(new + kept, residual, out=torch.empty_like(new)))

    def continue_from_staged(self, parts: Sequence[slice]) -> None:
        """Raise RuntimeError if the next tensor contains the last encoded values, since those are velocities."""
        if self._is_staged and parts:
            raise RuntimeError(
                "with momentum, a step must have exactly one synchronized backward pass, got a second one before the "
                "step; accumulate gradients under ddp.no_sync()"
            )


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the same pieces of tensors of equal length. A piece fits into a core's cache; on a GPU it is the tensor."""
    length = _PIECE_ELEMENTS if tensors[0].device.type == "cpu" else max(1, len(tensors[0]))
    return zip(*(tensor.split(length) for tensor in tensors), strict=True)


def overlap(part: slice, elements: slice) -> slice:
    """Return the slice of a tensor of `elements` that `part` covers."""
    start = max(part.start, elements.start)
    return slice(start - elements.start, max(min(part.stop, elements.stop), start) - elements.start)
