"""The methods of the horizon benchmark that average weights.

Shapes: S trainings, W workers of each, N elements of a worker's parameters.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from horizon_codecs import RoundTrip
from horizon_methods import Method, TwoPhaseMean, mean


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
        if step in self._rounds:
            self._step_theta(slice(None), self._mean(self._theta - self.weights))
            self.weights.copy_(self._theta)

    def _step_theta(self, columns: slice, gradient: Tensor) -> None:
        """Step some columns of theta on their outer gradient."""
        theta, momentum = self._theta[..., columns], self._momentum[..., columns]
        momentum.mul_(self.outer_momentum).add_(gradient)
        change = gradient + self.outer_momentum * momentum if self.nesterov else momentum
        theta.sub_(change, alpha=self.outer_lr)

    def bytes_a_step(self) -> float:
        return self._share * self._mean.wire_bytes * len(self._rounds) / self.num_steps


@dataclass
class StreamingDiLoCo(DiLoCo):
    """DiLoCo in fragments, with a delay: `delay` steps after its round began, x <- x + theta' - snapshot.

    At the end, the rounds in flight are applied. The package's fragments are not contiguous.

    Fragment p of F begins its rounds (p + 1) H / F steps after a multiple of H. No parameter is split.
    """

    fragments: int = 1
    delay: int = 0

    def _begin(self) -> None:
        super()._begin()
        size = self.num_elements / self.fragments
        members = [[p for p in self.parameters if int(p.start / size) == index] for index in range(self.fragments)]
        self._fragments = [
            (
                slice(parameters[0].start, parameters[-1].stop),
                TwoPhaseMean(
                    self.codec,
                    self.weights[..., parameters[0].start : parameters[-1].stop],
                    [parameter.shape.numel() for parameter in parameters],
                    self.decay,
                ),
            )
            for parameters in members
        ]
        self._changes: dict[tuple[int, int], Tensor] = {}  # by fragment and step

    def after_step(self, step: int) -> None:
        for index, (columns, average) in enumerate(self._fragments):
            offset = (index + 1) * self.inner_steps // self.fragments
            if step >= offset and (step - offset) % self.inner_steps == 0:
                snapshot = self.weights[..., columns].clone()
                self._step_theta(columns, average(self._theta[..., columns] - snapshot))
                self._changes[index, step + self.delay] = self._theta[..., columns] - snapshot
            # detach applies the rounds in flight.
            applied = [key for key in self._changes if key[0] == index and (key[1] == step or step == self.num_steps)]
            for key in applied:
                self.weights[..., columns].add_(self._changes.pop(key))


@dataclass
class DesLoc(DiLoCo):
    """DES-LOC (arXiv 2505.22549): DiLoCo that also averages the inner optimizer's moments, in float32.

    MT-DAO (arXiv 2510.05361) is plain averaging with a slow momentum in the inner optimizer, averaged in each round.

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
        moments_every: average the inner optimizer's moments, like the weights, every so many steps; 0: never.
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

    def _peers(self, values: Tensor, round_index: int) -> Tensor:
        """Return the mean of each worker's values with those of its peers in a round."""
        if self.mode == "all":
            return mean(values)
        half = self.num_workers // 2
        low, high = values[:, :half], values[:, half:]
        # Worker r < h meets (s + r) mod h + h in round s.
        shift = round_index % half
        low_mean = (low + high.roll(-shift, dims=1)) / 2
        return torch.cat((low_mean, low_mean.roll(shift, dims=1)), dim=1)

    def after_step(self, step: int) -> None:
        # The first late round begins with the training, before the first step: its weights are still equal.
        round_index = step - 1 if self.on_time else step
        if self._is_exact(step):
            self.weights.copy_(mean(self.weights))
            self._difference = None
        elif self.on_time:
            self.weights.copy_(self._peers(self.weights, round_index))
        else:
            if self._difference is not None:
                self.weights.add_(self._difference)
            self._difference = self._peers(self.weights, round_index) - self.weights
        if self._averages_moments(step):
            for moment in self.moments:
                moment.copy_(self._peers(moment, round_index))

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
