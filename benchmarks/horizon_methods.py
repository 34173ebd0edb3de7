"""The methods that the horizon benchmark compares, on the flat weights of many trainings.

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

    def average_gradients(self, grads: Tensor) -> None:
        """Change the gradients [S, W, N] in place. A CUDA graph captures this: no synchronization with the host."""

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

    def average_gradients(self, grads: Tensor) -> None:
        grads.copy_(mean(grads))

    def bytes_a_step(self) -> float:
        return self._ring_bytes(self.num_elements)


class TwoPhaseMean:
    """The mean of encoded values, encoded again: C(mean of C(x + e) + f), with the residuals e and f.

    Error feedback: e <- d e + x - C(d e + x), and f, the residual of the mean, likewise. The package's d is 1; MuLoCo's
    is 0.9 to 0.95. Without a codec: the mean.
    """

    def __init__(self, codec: str | None, like: Tensor, lengths: Sequence[int], decay: float | None) -> None:
        self._codec = None if codec is None else RoundTrip(codec, lengths)
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

    def average_gradients(self, grads: Tensor) -> None:
        grads.copy_(self._mean(grads))

    def bytes_a_step(self) -> float:
        return self._share * self._mean.wire_bytes


@dataclass
class DiLoCo(Method):
    """DiLoCoAlgorithm: an outer SGD steps theta on the mean of D = theta - x, then the weights x are theta.

    With Nesterov momentum, m = mu m + D; theta -= lr (D + mu m); without, theta -= lr m. LocalSGD is lr 1 and mu 0.

    Attributes:
        short_last: in this last part of the training, rounds are three times as frequent.
    """

    inner_steps: int
    codec: str | None = "minmax_uint4"
    decay: float | None = 1.0
    outer_lr: float = 0.7
    outer_momentum: float = 0.6
    nesterov: bool = True
    short_last: float = 0.0

    def _begin(self) -> None:
        self._theta = self.weights[:, :1].clone()
        self._momentum = torch.zeros_like(self._theta)
        self._mean = TwoPhaseMean(self.codec, self.weights, self.lengths, self.decay)
        first_short = round(self.num_steps * (1 - self.short_last))
        short_steps = max(1, self.inner_steps // 3)
        self._rounds = set(range(self.inner_steps, self.num_steps + 1, self.inner_steps))
        self._rounds |= set(range(first_short + short_steps, self.num_steps + 1, short_steps))
        self._rounds.add(self.num_steps)

    def after_step(self, step: int) -> None:
        if step not in self._rounds:
            return
        gradient = self._mean(self._theta - self.weights)
        self._momentum.mul_(self.outer_momentum).add_(gradient)
        change = gradient + self.outer_momentum * self._momentum if self.nesterov else self._momentum
        self._theta.sub_(change, alpha=self.outer_lr)
        self.weights.copy_(self._theta)

    def bytes_a_step(self) -> float:
        return self._share * self._mean.wire_bytes * len(self._rounds) / self.num_steps


@dataclass
class DesLoc(DiLoCo):
    """DES-LOC (arXiv 2505.22549): DiLoCo that also averages the inner optimizer's moments, in float32.

    Attributes:
        moments_every: the steps between two means of the first moment, and of the second.
    """

    moments_every: tuple[int, ...] = (90, 180)

    def after_step(self, step: int) -> None:
        for moment, interval in zip(self.moments, self.moments_every, strict=True):
            if step % interval == 0:
                moment.copy_(mean(moment))
        super().after_step(step)

    def bytes_a_step(self) -> float:
        pairs = zip(self.moments, self.moments_every, strict=True)
        return super().bytes_a_step() + sum(self._ring_bytes(moment.shape[2]) / interval for moment, interval in pairs)


@dataclass
class _Averaging(Method):
    """Options of methods that average weights in float32.

    Attributes:
        moments_every: average the inner optimizer's moments over the same workers every so many steps; 0: never.
        exact_last: in this last part of the training, all workers average their weights exactly after each step.
    """

    moments_every: int = 0
    exact_last: float = 0.0

    def _is_exact(self, step: int) -> bool:
        return step > self.num_steps - self.exact_last * self.num_steps

    def _averages_moments(self, step: int) -> bool:
        return bool(self.moments_every) and step % self.moments_every == 0

    def _mean_bytes(self, weights_a_step: float, weights_bytes: float, moment_bytes: float) -> float:
        """Return the bytes a step, given those of a mean of weights and of an element of the moments."""
        num_moments = sum(moment.shape[2] for moment in self.moments)
        moments = num_moments * moment_bytes / self.moments_every if self.moments_every else 0.0
        exact = self.exact_last * self._ring_bytes(self.num_elements)
        return (1 - self.exact_last) * weights_a_step * weights_bytes + exact + moments


@dataclass
class Decentralized(_Averaging):
    """DecentralizedAlgorithm: x <- x + update(x) + mean(x) - x; the mean is of the weights before the step.

    Attributes:
        mode: "all", or "shift_one" for the mean of pairs that change every step.
        on_time: x <- mean(x + update(x)): the mean is of the weights after the step.
    """

    mode: str = "all"
    on_time: bool = False

    def _begin(self) -> None:
        self._difference: Tensor | None = None

    def _peers(self, values: Tensor, num_rounds: int) -> Tensor:
        """Return the mean of each worker's values with those of its peers in round `num_rounds`, from 0."""
        if self.mode == "all":
            return mean(values)
        half = self.num_workers // 2
        low, high = values[:, :half], values[:, half:]
        # Worker r < h meets (s + r) mod h + h in round s.
        shift = num_rounds % half
        low_mean = (low + high.roll(-shift, dims=1)) / 2
        return torch.cat((low_mean, low_mean.roll(shift, dims=1)), dim=1)

    def after_step(self, step: int) -> None:
        num_rounds = step - 1
        if self._is_exact(step):
            self.weights.copy_(mean(self.weights))
            self._difference = None
        elif self.on_time:
            self.weights.copy_(self._peers(self.weights, num_rounds))
        else:
            if self._difference is not None:
                self.weights.add_(self._difference)
            self._difference = self._peers(self.weights, step) - self.weights
        if self._averages_moments(step):
            for moment in self.moments:
                moment.copy_(self._peers(moment, num_rounds))

    def bytes_a_step(self) -> float:
        element_bytes = self._ring_bytes(1) if self.mode == "all" else 4.0
        return self._mean_bytes(1, element_bytes * self.num_elements, element_bytes)


@dataclass
class LowPrecision(Method):
    """LowPrecisionDecentralizedAlgorithm on a ring: d = x + L / 3 + R / 3 - 5 / 3 w; w <- w + C(d); x <- w.

    L and R are the w of the neighbors, since replicas are equal on all workers.
    """

    codec: str = "minmax_uint8"

    def _begin(self) -> None:
        self._replica = self.weights.clone()
        self._codec = RoundTrip(self.codec, self.lengths)

    def after_step(self, step: int) -> None:
        replica = self._replica
        neighbors = replica.roll(1, dims=1) + replica.roll(-1, dims=1)
        replica.add_(self._codec(self.weights + neighbors / 3 - replica * (5 / 3)))
        self.weights.copy_(replica)

    def bytes_a_step(self) -> float:
        return 2.0 * self._codec.wire_bytes


@dataclass
class Async(_Averaging):
    """AsyncModelAverageAlgorithm, with steps instead of times: x += mean(snapshot) - snapshot, `delay` steps later.

    Attributes:
        delay: less than `interval`; 0 averages on time.
    """

    interval: int = 4
    delay: int = 2

    def _begin(self) -> None:
        self._difference: Tensor | None = None

    def after_step(self, step: int) -> None:
        if self._is_exact(step):
            self.weights.copy_(mean(self.weights))
            self._difference = None
        else:
            if step % self.interval == 0:
                self._difference = mean(self.weights) - self.weights
            if self._difference is not None and step % self.interval == self.delay:
                self.weights.add_(self._difference)
                self._difference = None
        if self._averages_moments(step):
            for moment in self.moments:
                moment.copy_(mean(moment))

    def bytes_a_step(self) -> float:
        return self._mean_bytes(1 / self.interval, self._ring_bytes(self.num_elements), self._ring_bytes(1))


def mean(values: Tensor) -> Tensor:
    """Return the mean over workers [S, 1, ...] of values [S, W, ...]."""
    return values.mean(1, keepdim=True)
