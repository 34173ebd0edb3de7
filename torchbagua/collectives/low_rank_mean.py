"""The mean of matrices by a product of two factors, which travel in their place (PowerSGD, arXiv 1905.13727).

A factor of rank r is kept as r vectors, the transpose of the paper's P or Q. Shape suffixes: N elements of a bucket,
L of the first payload, F of the second.
"""

import hashlib
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchbagua.codecs.base import Compressor
from torchbagua.codecs.blocks import TensorSpec
from torchbagua.collectives.centralized_mean import Mean, centralized_mean
from torchbagua.collectives.low_rank_state import LowRankState, MatrixShape, MatrixState
from torchbagua.collectives.nodes import NodeGroups
from torchbagua.collectives.orthogonalise import FactorPlace, Orthogonaliser
from torchbagua.observe.events import Details

_PRODUCT_ELEMENTS = 8192  # of a part of a product, about


def first_factor(seed: str, num_elements: int) -> torch.Tensor:
    """Return pseudo-random numbers between -1 and 1, float32, the same on every machine: SHAKE-256 of `seed`."""
    digest = bytearray(hashlib.shake_256(seed.encode()).digest(2 * num_elements))
    return (2.0 * torch.frombuffer(digest, dtype=torch.int16).float() + 1.0) / 65536.0


def product_table(shape: MatrixShape) -> torch.Tensor:
    """Return the table of a product, see torchbagua/native/low_rank.py: some rows of the matrix in each of its rows."""
    rows, columns, rank = shape
    at_once = max(1, _PRODUCT_ELEMENTS // columns)
    return torch.tensor(
        [(at * columns, min(at_once, rows - at), columns, rank, at, rows, 0) for at in range(0, rows, at_once)]
    )


class _Member(NamedTuple):
    """A matrix: its elements in the bucket, its state, and where its factors travel and are multiplied."""

    elements: slice
    state: MatrixState
    left: FactorPlace
    right: FactorPlace
    own_left: torch.Tensor
    own_right: torch.Tensor
    products: torch.Tensor
    seed: str

    @property
    def matrix(self) -> torch.Tensor:
        """Gradient and error, until the error takes their place."""
        return self.state.staged_error.view(self.state.shape.rows, self.state.shape.columns)


class LowRankMean:
    """Mean of a bucket whose matrices travel as two factors each. All ranks get the same bits.

    With M = gradient + error, of every matrix:

    1. The right factor Q of the last step is made orthonormal. A vector that is zero, since there was no step yet or
       nothing in its direction, starts anew from its seed.
    2. P = mean of M Q over the ranks, which travels together with all that is no matrix; and is made orthonormal.
    3. Q = mean of M^T P.
    4. The matrix becomes P Q^T. M - P Q^T is staged as the error, and Q as the right factor.

    M Q and M^T P are torch's matrix products of this rank's own values. The same values give the same bits there if
    they are aligned alike, and the number of threads is the same: so every operand is a tensor of its own. What must be
    the same on all ranks is formed by kernels of this package.

    Args:
        group: who takes part.
        compressor: how factors, and what is no matrix, are sent.
        spec: the bucket's tensor, float32.
        state: of the bucket; there is a matrix in it.
        names: of the parameters, for seeds.
        seed: where right factors start from, together with the name.
        hierarchical: see `centralized_mean`.
    """

    def __init__(
        self,
        group: NodeGroups,
        compressor: Compressor,
        spec: TensorSpec,
        state: LowRankState,
        names: Sequence[str],
        seed: int,
        *,
        hierarchical: bool,
    ) -> None:
        self._tracer = group.world.tracer
        self._name, self._device, self._state = spec.name, spec.device, state
        ends = list(itertools.accumulate(spec.segment_lengths))
        parts = [slice(end - n, end) for end, n in zip(ends, spec.segment_lengths, strict=True)]
        self._vectors = [part for part, matrix in zip(parts, state.matrices, strict=True) if matrix is None]
        vector_lengths = [part.stop - part.start for part in self._vectors]
        self._members: list[_Member] = []
        left_start, right_start = sum(vector_lengths), 0
        for part, matrix, name in zip(parts, state.matrices, names, strict=True):
            if matrix is None:
                continue
            rows, columns, rank = matrix.shape
            left, right = FactorPlace(left_start, rank, rows), FactorPlace(right_start, rank, columns)
            left_start, right_start = left.elements.stop, right.elements.stop
            own_left, own_right = (torch.zeros(rank, n, device=spec.device) for n in (rows, columns))
            products = product_table(matrix.shape).to(spec.device)
            self._members.append(_Member(part, matrix, left, right, own_left, own_right, products, f"{seed} {name}"))
        self._first_F = self._first_rights("")
        lefts, rights = [one.left for one in self._members], [one.right for one in self._members]
        self._orthogonalise_left = Orthogonaliser(lefts, spec.device)
        self._orthogonalise_right = Orthogonaliser(rights, spec.device)

        def mean_of(segments: Sequence[int]) -> Mean:
            payload = TensorSpec(tuple(segments), torch.float32, spec.device, spec.name)
            return centralized_mean(group, compressor, payload, hierarchical=hierarchical)

        self._mean_left = mean_of([*vector_lengths, *(one.rank * one.length for one in lefts)])
        self._mean_right = mean_of([one.rank * one.length for one in rights])
        self._left_L = torch.zeros(left_start, device=spec.device)
        self._right_F = torch.zeros(right_start, device=spec.device)

    def __call__(self, x_N: torch.Tensor, step: int) -> None:
        """Replace `x_N` by the mean, and stage what the next step starts from.

        Args:
            x_N: the bucket's tensor.
            step: of which right factors are made, where they are not kept.
        """
        details = Details(bucket=self._name)
        vectors_L = self._left_L[: self._members[0].left.start].split([one.stop - one.start for one in self._vectors])
        with self._tracer.span("encode", details):
            self._begin(x_N, step)
            for part, vector in zip(self._vectors, vectors_L, strict=True):
                vector.copy_(x_N[part])
        self._mean_left(self._left_L)
        with self._tracer.span("reduce", details):
            self._orthogonalise_left(self._left_L)
            for one in self._members:
                one.own_left.view(-1).copy_(self._left_L[one.left.elements])
                torch.mm(one.own_left, one.matrix, out=one.own_right)
                self._right_F[one.right.elements].copy_(one.own_right.view(-1))
        self._mean_right(self._right_F)
        with self._tracer.span("decode", details):
            for part, vector in zip(self._vectors, vectors_L, strict=True):
                x_N[part].copy_(vector)
            self._end(x_N)

    def _begin(self, x_N: torch.Tensor, step: int) -> None:
        """Form M, in the place of the staged error, and M Q."""
        first_F = self._first_F if self._state.keeps_right else self._first_rights(f" {step}")
        for one in self._members:
            error, right = one.state.base
            torch.add(x_N[one.elements], error, out=one.state.staged_error)
            first = first_F[one.right.elements].view_as(one.own_right)
            if self._state.keeps_right:
                kept = right.view_as(first)
                first = torch.where((kept != 0).any(1, keepdim=True), kept, first)
            self._right_F[one.right.elements] = first.view(-1)
        self._orthogonalise_right(self._right_F)
        for one in self._members:
            one.own_right.view(-1).copy_(self._right_F[one.right.elements])
            torch.mm(one.own_right, one.matrix.t(), out=one.own_left)
            self._left_L[one.left.elements].copy_(one.own_left.view(-1))

    def _end(self, x_N: torch.Tensor) -> None:
        """Form P Q^T and what it leaves out."""
        are_finite = []
        for one in self._members:
            right = self._right_F[one.right.elements]
            one.own_right.view(-1).copy_(right)
            are_finite.append(right.isfinite().all())
            if self._state.keeps_right:
                one.state.staged_right.copy_(right)
            one.state.is_staged = True
            torch.ops.torchbagua.low_rank_product(
                one.own_left.view(-1), one.own_right.view(-1), one.products, x_N[one.elements], one.state.staged_error
            )
        self._state.are_finite = torch.stack(are_finite)
        if self._tracer.samples:
            staged = [one.state.staged_error for one in self._members]
            self._tracer.measure(lambda: {"residual of what is sent": torch.cat(staged).norm()}, self._name)

    def _first_rights(self, step: str) -> torch.Tensor:
        firsts = [first_factor(one.seed + step, one.right.rank * one.right.length) for one in self._members]
        return torch.cat(firsts).to(self._device)
