"""The horizon benchmark's methods that average gradients, on the flat weights of many trainings.

horizon_weights.py has those that average weights, and horizon_momentum.py those that send momentum.

Shapes: S trainings, W workers of each, N elements of a worker's parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from horizon_codecs import RoundTrip
from horizon_model import Parameter


@dataclass
class Method:
    """Averages gradients, or weights. A subclass has the arguments of the method as fields.

    Attributes:
        weights: [S, W, N], a view that the inner optimizer steps too.
        moments: the inner optimizer's state, [S, W, ...] each.
        parameters: of a worker, in the order of the flat weights.
        lengths: their numbers of elements.
        state: the tensors that `average_gradients` changes.
    """

    def bind(self, weights: Tensor, moments: Sequence[Tensor], num_steps: int, parameters: Sequence[Parameter]) -> None:
        """Start trainings of `num_steps` steps. All workers have equal weights."""
        self.weights, self.moments, self.num_steps, self.parameters = weights, moments, num_steps, parameters
        self.lengths = [parameter.shape.numel() for parameter in parameters]
        self.num_workers, self.num_elements = weights.shape[1:]
        self.state: list[Tensor] = []
        self._begin()

    def _begin(self) -> None:
        """Create the state."""

    def average_gradients(self, grads: Tensor, rates: Tensor) -> None:
        """Change the gradients [S, W, N] in place, given the learning rates [S, 1, 1] of this step.

        A CUDA graph captures this: no copy from the host, and no synchronization with it.
        """

    def after_step(self, step: int) -> None:
        """Change the weights after the inner optimizer's step number `step`, from 1."""

    def bytes_a_step(self) -> float:
        """Return the bytes that a worker sends in a step, on average over the training."""
        raise NotImplementedError

    def _ring_bytes(self, num_elements: float) -> float:
        """Return the bytes that a worker sends in an all-reduce of float32."""
        return 4 * num_elements * self._share

    @property
    def _share(self) -> float:
        return 2 * (self.num_workers - 1) / self.num_workers


@dataclass
class DDP(Method):
    """The mean gradient, in float32."""

    def average_gradients(self, grads: Tensor, rates: Tensor) -> None:
        grads.copy_(mean(grads))

    def bytes_a_step(self) -> float:
        return self._ring_bytes(self.num_elements)


class TwoPhaseMean:
    """The mean of encoded values, encoded again: C(mean of C(x + e) + f), with the residuals e and f.

    Error feedback: e <- d e + x - C(d e + x), and f, the residual of the mean, likewise. The package's d is 1; MuLoCo's
    is 0.9 to 0.95. Without a codec: the mean.
    """

    def __init__(
        self, codec: str | None, like: Tensor, lengths: Sequence[int], decay: float | None, ratio: float = 0.01
    ) -> None:
        self._codec = None if codec is None else RoundTrip(codec, lengths, ratio)
        self._decay = decay or 0.0
        has_feedback = codec is not None and decay is not None
        self.residuals = [torch.zeros_like(like), torch.zeros_like(like[:, :1])] if has_feedback else []
        self.wire_bytes = 4.0 * sum(lengths) if self._codec is None else float(self._codec.wire_bytes)

    def __call__(self, values: Tensor) -> Tensor:
        """Return the mean [S, 1, N] of values [S, W, N]."""
        if self._codec is None:
            return mean(values)
        return self._encode(mean(self._encode(values, 0)), 1)

    def _encode(self, values: Tensor, phase: int) -> Tensor:
        assert self._codec is not None
        if not self.residuals:
            return self._codec(values)
        residual = self.residuals[phase]
        residual.mul_(self._decay).add_(values)
        decoded = self._codec(residual)
        residual.sub_(decoded)
        return decoded


@dataclass
class Compressed(Method):
    """The mean gradient, encoded: ByteGrad with "minmax_uint8", CompressedAllReduce with "minmax_uint4"."""

    codec: str
    decay: float | None = None  # of the residuals; None: no error feedback

    def _begin(self) -> None:
        self._mean = TwoPhaseMean(self.codec, self.weights, self.lengths, self.decay)
        self.state = self._mean.residuals

    def average_gradients(self, grads: Tensor, rates: Tensor) -> None:
        grads.copy_(self._mean(grads))

    def bytes_a_step(self) -> float:
        return self._share * self._mean.wire_bytes


@dataclass
class TopK(Compressed):
    """TopKAlgorithm: the mean gradient, of which the largest elements are sent.

    Attributes:
        ratio: the fraction of the elements that is sent.
    """

    codec: str = "topk"
    decay: float | None = 1.0
    ratio: float = 0.01

    def _begin(self) -> None:
        self._mean = TwoPhaseMean(self.codec, self.weights, self.lengths, self.decay, self.ratio)
        self.state = self._mean.residuals


def mean(values: Tensor) -> Tensor:
    """Return the mean over workers [S, 1, ...] of values [S, W, ...]."""
    return values.mean(1, keepdim=True)
