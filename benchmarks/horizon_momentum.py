"""Methods that send momentum instead of gradients, and keep on each worker what they have not sent.

Shapes: S trainings, W workers of each, N elements of a worker's parameters; K matrices of m x n side by side.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from horizon_methods import Method, mean
from horizon_model import Parameter

CHUNK_SIDE = 64


@dataclass
class DeMo(Method):
    """DeMo (arXiv 2411.19870, in the form of its authors' code): workers send the largest DCT coefficients of momentum.

    m <- decay m + rate g; q = the largest coefficients of each chunk of m; m <- m - q. A coefficient is averaged over
    the workers that sent it, and the inner optimizer steps along the signs of the result.

    Attributes:
        num_kept: the coefficients of a chunk of 64 x 64, and of 64 elements of a vector.
    """

    num_kept: int = 32
    decay: float = 0.999

    def _begin(self) -> None:
        self._momentum = torch.zeros_like(self.weights)
        self.state = [self._momentum]
        self._runs = list(_runs(self.parameters))
        sides = {_chunk_side(side) for _, (_, height, width) in self._runs for side in (height, width)}
        self._bases = {side: self._basis(side).to(self.weights.device) for side in sides}

    def _basis(self, length: int) -> Tensor:
        return dct(length)

    def average_gradients(self, grads: Tensor, rates: Tensor) -> None:
        self._momentum.mul_(self.decay).add_(grads * rates)
        for columns, (count, height, width) in self._runs:
            matrices = (count, height, width)
            momentum = self._momentum[..., columns].unflatten(-1, matrices)
            vertical, horizontal = (self._bases[_chunk_side(side)] for side in (height, width))
            chunks = _to_chunks(momentum, len(vertical), len(horizontal))
            coefficients = (vertical @ chunks @ horizontal.mT).flatten(-2)
            is_kept = self._largest(coefficients)
            kept = coefficients * is_kept
            averaged = self._average(kept, is_kept, columns)
            sent, update = (
                _from_chunks(vertical.mT @ values.view(*values.shape[:-1], *chunks.shape[-2:]) @ horizontal, matrices)
                for values in (kept, averaged)
            )
            momentum.sub_(sent)
            grads[..., columns].unflatten(-1, matrices).copy_(update)

    def _largest(self, coefficients: Tensor) -> Tensor:
        """Return a mask of the largest coefficients of each chunk."""
        num_kept = min(self.num_kept, coefficients.shape[-1])
        return torch.zeros_like(coefficients).scatter_(-1, coefficients.abs().topk(num_kept).indices, 1.0)

    def _average(self, kept: Tensor, is_kept: Tensor, columns: slice) -> Tensor:
        """Return the mean over the workers that sent a coefficient."""
        return kept.sum(1, keepdim=True) / is_kept.sum(1, keepdim=True).clamp(min=1)

    def bytes_a_step(self) -> float:
        """Return those of an all-gather, 16 bits for each value and 16 for its position."""
        return (self.num_workers - 1) * self._payload_bytes()

    def _payload_bytes(self) -> float:
        payload = 0.0
        for _, (count, height, width) in self._runs:
            chunk = _chunk_side(height) * _chunk_side(width)
            payload += 4 * count * height * width / chunk * min(self.num_kept, chunk)
        return payload


@dataclass
class TwoPhaseDeMo(DeMo):
    """DeMo over a reduce-scatter and an all-gather: the owner of a chunk sends the largest coefficients of the mean.

    It keeps the others, as the workers do: f <- decay f + mean(q); the owner sends the largest of f.
    """

    def _begin(self) -> None:
        super()._begin()
        self._kept_of_mean = torch.zeros_like(self.weights[:, :1])
        self.state.append(self._kept_of_mean)

    def _average(self, kept: Tensor, is_kept: Tensor, columns: slice) -> Tensor:
        residual = self._kept_of_mean[..., columns].view(len(kept), 1, *kept.shape[2:])
        total = residual * self.decay + mean(kept)
        sent = total * self._largest(total)
        residual.copy_(total - sent)
        return sent

    def bytes_a_step(self) -> float:
        return self._share * self._payload_bytes()


@dataclass
class SparseMomentum(DeMo):
    """DeMo without the transform: workers send the largest elements of their momentum."""

    def _basis(self, length: int) -> Tensor:
        return torch.eye(length)


@dataclass
class Dion(Method):
    """Dion (arXiv 2504.05295): workers average the two factors of a low-rank approximation of the momentum.

    m <- m + g; P = the orthonormal basis of mean(m Q); R = mean(m^T P); m <- m - (1 - decay) P R^T; Q = R with columns
    of norm 1. The inner optimizer steps along P Q^T, scaled as Muon's updates. The gradients of the parameters that are
    not in the layers are averaged in float32.

    Attributes:
        has_full_size: scale the update further, to the root mean square of a Muon update of full rank.
    """

    rank: int
    decay: float = 0.95
    has_full_size: bool = False

    def _begin(self) -> None:
        hidden = [parameter for parameter in self.parameters if parameter.is_hidden]
        self._runs = list(_runs(hidden))
        self._rest = slice(sum(parameter.shape.numel() for parameter in hidden), self.num_elements)
        self._momentum = torch.zeros_like(self.weights[..., : self._rest.start])
        generator = torch.Generator().manual_seed(0)
        self._bases = [
            torch.randn(count, width, self.rank, generator=generator)
            .to(self.weights.device)
            .repeat(len(self.weights), 1, 1, 1, 1)
            for _, (count, _, width) in self._runs
        ]
        self.state = [self._momentum, *self._bases]

    def average_gradients(self, grads: Tensor, rates: Tensor) -> None:
        grads[..., self._rest].copy_(mean(grads[..., self._rest]))
        self._momentum.add_(grads[..., : self._rest.start])
        for (columns, matrices), basis in zip(self._runs, self._bases, strict=True):
            momentum = self._momentum[..., columns].unflatten(-1, matrices)
            left, _ = torch.linalg.qr(mean(momentum @ basis))
            right = mean(momentum.mT @ left)
            momentum.sub_((1 - self.decay) * (left @ right.mT))
            basis.copy_(right / right.norm(dim=-2, keepdim=True).clamp(min=1e-8))
            scale = 0.2 * max(matrices[1:]) ** 0.5
            if self.has_full_size:
                scale *= (min(matrices[1:]) / self.rank) ** 0.5
            grads[..., columns].unflatten(-1, matrices).copy_(scale * left @ basis.mT)

    def bytes_a_step(self) -> float:
        factors = sum(count * self.rank * (height + width) for _, (count, height, width) in self._runs)
        return self._ring_bytes(factors + self._rest.stop - self._rest.start)


def _runs(parameters: Sequence[Parameter]) -> Iterator[tuple[slice, tuple[int, int, int]]]:
    """Yield the columns of parameters of equal shape, and (K, m, n); a vector is a matrix of one row."""
    for shape, group in groupby(parameters, key=lambda parameter: parameter.shape):
        run = list(group)
        height, width = shape if len(shape) == 2 else (1, shape.numel())
        yield slice(run[0].start, run[-1].stop), (len(run), height, width)


def _chunk_side(length: int) -> int:
    return max(side for side in range(1, CHUNK_SIDE + 1) if length % side == 0)


def _to_chunks(matrices: Tensor, height: int, width: int) -> Tensor:
    """Cut matrices [..., K, m, n] into chunks [..., K, m / height, n / width, height, width]."""
    return matrices.unflatten(-1, (-1, width)).unflatten(-3, (-1, height)).transpose(-3, -2)


def _from_chunks(chunks: Tensor, matrices: tuple[int, int, int]) -> Tensor:
    return chunks.transpose(-3, -2).reshape(*chunks.shape[:2], *matrices)


def dct(length: int) -> Tensor:
    """Return the orthonormal matrix of the DCT-II."""
    position = torch.arange(length)
    matrix = torch.cos(math.pi / length * (position + 0.5) * position[:, None]) * math.sqrt(2 / length)
    matrix[0] /= math.sqrt(2)
    return matrix
