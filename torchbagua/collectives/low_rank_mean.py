"""The mean of matrices as a product of two factors, which ranks send in their stead (PowerSGD, arXiv 1905.13727).

A factor of rank r is stored as r vectors, the transpose of the paper's P or Q. Shape suffixes: N elements of a bucket,
L of the first payload, F of the second.
"""

import hashlib
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchbagua.codecs.base import Compressor, TensorSpec
from torchbagua.collectives.mean import Mean, NodeGroups, centralized_mean
from torchbagua.native.low_rank import PIECE_ELEMENTS, num_entries
from torchbagua.observe.events import Details

_PRODUCT_ELEMENTS = 8192  # approximate number of elements in a part of a product


class FactorPlace(NamedTuple):
    """The place of a factor in a flat tensor: `rank` vectors of `length` elements, one after the other."""

    start: int
    rank: int
    length: int

    @property
    def elements(self) -> slice:
        """The elements of the factor."""
        return slice(self.start, self.start + self.rank * self.length)


class Orthogonaliser:
    """Makes the vectors of each factor orthonormal.

    It runs the Gram-Schmidt process on the inner products of the vectors, in float64. So it reads a factor twice,
    however many vectors that has. Every sum has a fixed order, so equal values give bitwise equal results on every
    machine. A vector that is zero, or linearly dependent on earlier vectors to within rounding, becomes zero. A vector
    with NaN or Inf becomes NaN, and so do the vectors after it.
    """

    def __init__(self, places: Sequence[FactorPlace], device: torch.device) -> None:
        pieces: list[tuple[int, ...]] = []
        matrices: list[tuple[int, ...]] = []
        for matrix, (start, rank, length) in enumerate(places):
            firsts = range(0, length, PIECE_ELEMENTS)
            matrices.append((len(pieces), len(firsts), rank))
            pieces += [(start + at, length, rank, min(PIECE_ELEMENTS, length - at), matrix) for at in firsts]
        self._pieces = torch.tensor(pieces, device=device)
        self._matrices = torch.tensor(matrices, device=device)
        most = max(num_entries(place.rank) for place in places)
        self._products = torch.zeros(len(pieces), most, dtype=torch.float64, device=device)
        self._coefficients = torch.zeros(len(matrices), 2 * most, dtype=torch.float64, device=device)

    def __call__(self, factors: torch.Tensor) -> None:
        """Orthonormalize the factors in place, in a flat float32 tensor."""
        torch.ops.torchbagua.low_rank_gram(factors, self._pieces, self._products)
        torch.ops.torchbagua.low_rank_solve(self._products, self._matrices, self._coefficients)
        torch.ops.torchbagua.low_rank_combine(self._coefficients, self._pieces, factors)


class MatrixShape(NamedTuple):
    """The shape of a matrix in row-major order, `rows` by `columns`, and the rank of the product that replaces it."""

    rows: int
    columns: int
    rank: int


def matrix_shape(shape: Sequence[int], num_elements: int, rank: int, min_rate: float) -> MatrixShape | None:
    """Return a tensor as a matrix whose rows are the first dimension; None if the factors are not much smaller."""
    if len(shape) < 2 or num_elements == 0:
        return None
    rows, columns = shape[0], num_elements // shape[0]
    own_rank = min(rank, rows, columns)
    is_smaller = num_elements > min_rate * own_rank * (rows + columns)
    return MatrixShape(rows, columns, own_rank) if is_smaller else None


class MatrixState:
    """The state of one matrix: the residual, the right factor of the last step, and the staged values of both."""

    def __init__(self, shape: MatrixShape, error: torch.Tensor, right: torch.Tensor) -> None:
        self.shape = shape
        self.error, self.right = error, right
        self.staged_error, self.staged_right = torch.zeros_like(error), torch.zeros_like(right)
        self.is_staged = False
        self.is_continued = False

    @property
    def base(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual and the right factor with which the next step starts."""
        return (self.staged_error, self.staged_right) if self.is_continued else (self.error, self.right)

    def commit(self) -> None:
        """Commit the staged values."""
        self.error, self.staged_error = self.staged_error, self.error
        self.right, self.staged_right = self.staged_right, self.right
        self.is_staged = self.is_continued = False


class LowRankState:
    """The state of the parameters of one bucket: residuals and right factors; see `BucketState`.

    Memory: 8 bytes per element of a matrix.

    Attributes:
        keeps_right: the argument.
        matrices: a state for each parameter; None for a parameter that is sent without factors.
        are_finite: whether the staged values are finite, one bool for each matrix; None before anything is staged, and
            after `unstage`.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        shapes: Sequence[MatrixShape | None],
        device: torch.device,
        held: Sequence[Sequence[torch.Tensor]] | None,
        *,
        keeps_right: bool,
    ) -> None:
        self.keeps_right = keeps_right
        self.are_finite: torch.Tensor | None = None
        self._device = device
        ends = list(itertools.accumulate(lengths))
        self._parts = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        self.matrices: list[MatrixState | None] = []
        for index, (length, shape) in enumerate(zip(lengths, shapes, strict=True)):
            if shape is None:
                self.matrices.append(None)
                continue
            right_length = shape.rank * shape.columns if keeps_right else 0
            error, right = (torch.zeros(n, device=device) for n in (length, right_length))
            if held is not None:
                error, right = held[index]
            self.matrices.append(MatrixState(shape, error, right))

    def continue_from_staged(self, parts: Sequence[slice]) -> None:
        """Prepare for the next backward; the gradients of these parts still contain averages."""
        for own, matrix in zip(self._parts, self.matrices, strict=True):
            if matrix is not None:
                matrix.is_continued = matrix.is_staged and _is_within(own, parts)

    def unstage(self, is_used_N: torch.Tensor) -> None:
        """Stage the committed values of matrices that are not finite, or for whose elements `is_used_N` is False."""
        are_finite = itertools.repeat(None) if self.are_finite is None else iter(self.are_finite.unbind())
        for own, matrix in zip(self._parts, self.matrices, strict=True):
            if matrix is None:
                continue
            is_finite = next(are_finite)
            if matrix.is_staged:
                is_used = is_used_N[own.start]
                if is_finite is not None:
                    is_used = is_used & is_finite
                for staged, kept in ((matrix.staged_error, matrix.error), (matrix.staged_right, matrix.right)):
                    torch.where(is_used, staged, kept, out=staged)
        self.are_finite = None

    def commit(self, parts: Sequence[slice] | None = None) -> None:
        """Commit the staged values of these parts, by default of all parts, if they are finite."""
        are_finite = itertools.repeat(True) if self.are_finite is None else iter(self.are_finite.tolist())
        for own, matrix in zip(self._parts, self.matrices, strict=True):
            if matrix is None:
                continue
            is_finite = next(are_finite)
            if matrix.is_staged and is_finite and (parts is None or _is_within(own, parts)):
                matrix.commit()

    def expand(self, part: slice) -> Sequence[torch.Tensor]:
        """Return the committed state of one parameter: its residual and its right factor, flat."""
        matrix = self.matrices[self._parts.index(part)]
        if matrix is None:
            return torch.zeros(part.stop - part.start, device=self._device), torch.zeros(0, device=self._device)
        return matrix.error, matrix.right


def _is_within(own: slice, parts: Sequence[slice]) -> bool:
    return any(part.start <= own.start and own.stop <= part.stop for part in parts)


def first_factor(seed: str, num_elements: int) -> torch.Tensor:
    """Return pseudo-random numbers between -1 and 1, float32, the same on every machine: SHAKE-256 of `seed`."""
    digest = bytearray(hashlib.shake_256(seed.encode()).digest(2 * num_elements))
    return (2.0 * torch.frombuffer(digest, dtype=torch.int16).float() + 1.0) / 65536.0


def product_table(shape: MatrixShape) -> torch.Tensor:
    """Return the table of a product, see torchbagua/native/low_rank.py: a table row describes several matrix rows."""
    rows, columns, rank = shape
    at_once = max(1, _PRODUCT_ELEMENTS // columns)
    return torch.tensor(
        [(at * columns, min(at_once, rows - at), columns, rank, at, rows, 0) for at in range(0, rows, at_once)]
    )


class _Member(NamedTuple):
    """A matrix: its elements in the bucket, its state, and where its factors are sent from and multiplied."""

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
        """Gradient plus residual; later, the new residual replaces it."""
        return self.state.staged_error.view(self.state.shape.rows, self.state.shape.columns)


class LowRankMean:
    """Mean of a bucket whose matrices are sent as two factors each. The result is bitwise equal on all ranks.

    With M = gradient + residual, for every matrix:

    1. The right factor Q of the last step is orthonormalized. A vector that is zero, because there was no step yet or
       nothing in its direction, restarts from its seed.
    2. P = mean of M Q over the ranks, sent together with all tensors that are not matrices; then P is orthonormalized.
    3. Q = mean of M^T P.
    4. The matrix becomes P Q^T. M - P Q^T is staged as the residual, and Q as the right factor.

    M Q and M^T P are torch's matrix products of this rank's values. Equal values give bitwise equal products if their
    alignment and the number of threads are the same, so every operand is a separate tensor. This package's kernels
    compute the results that must be equal on all ranks.
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
        lefts, rights = [member.left for member in self._members], [member.right for member in self._members]
        self._orthogonalise_left = Orthogonaliser(lefts, spec.device)
        self._orthogonalise_right = Orthogonaliser(rights, spec.device)

        def mean_of(segments: Sequence[int]) -> Mean:
            payload = TensorSpec(tuple(segments), torch.float32, spec.device, spec.name)
            return centralized_mean(group, compressor, payload, hierarchical=hierarchical)

        self._mean_left = mean_of([*vector_lengths, *(place.rank * place.length for place in lefts)])
        self._mean_right = mean_of([place.rank * place.length for place in rights])
        self._left_L = torch.zeros(left_start, device=spec.device)
        self._right_F = torch.zeros(right_start, device=spec.device)

    def __call__(self, x_N: torch.Tensor, step: int) -> None:
        """Replace `x_N` by the mean, and stage the state with which the next step starts."""
        details = Details(bucket=self._name)
        vectors_L = self._left_L[: self._members[0].left.start].split(
            [part.stop - part.start for part in self._vectors]
        )
        with self._tracer.span("encode", details):
            self._begin(x_N, step)
            for part, vector in zip(self._vectors, vectors_L, strict=True):
                vector.copy_(x_N[part])
        self._mean_left(self._left_L)
        with self._tracer.span("reduce", details):
            self._orthogonalise_left(self._left_L)
            for member in self._members:
                member.own_left.view(-1).copy_(self._left_L[member.left.elements])
                torch.mm(member.own_left, member.matrix, out=member.own_right)
                self._right_F[member.right.elements].copy_(member.own_right.view(-1))
        self._mean_right(self._right_F)
        with self._tracer.span("decode", details):
            for part, vector in zip(self._vectors, vectors_L, strict=True):
                x_N[part].copy_(vector)
            self._end(x_N)

    def _begin(self, x_N: torch.Tensor, step: int) -> None:
        """Compute M, in the memory of the staged residual, and M Q."""
        first_F = self._first_F if self._state.keeps_right else self._first_rights(f" {step}")
        for member in self._members:
            error, right = member.state.base
            torch.add(x_N[member.elements], error, out=member.state.staged_error)
            first = first_F[member.right.elements].view_as(member.own_right)
            if self._state.keeps_right:
                kept = right.view_as(first)
                first = torch.where((kept != 0).any(1, keepdim=True), kept, first)
            self._right_F[member.right.elements] = first.view(-1)
        self._orthogonalise_right(self._right_F)
        for member in self._members:
            member.own_right.view(-1).copy_(self._right_F[member.right.elements])
            torch.mm(member.own_right, member.matrix.t(), out=member.own_left)
            self._left_L[member.left.elements].copy_(member.own_left.view(-1))

    def _end(self, x_N: torch.Tensor) -> None:
        """Compute P Q^T and its residual."""
        are_finite = []
        for member in self._members:
            right = self._right_F[member.right.elements]
            member.own_right.view(-1).copy_(right)
            are_finite.append(right.isfinite().all())
            if self._state.keeps_right:
                member.state.staged_right.copy_(right)
            member.state.is_staged = True
            torch.ops.torchbagua.low_rank_product(
                member.own_left.view(-1),
                member.own_right.view(-1),
                member.products,
                x_N[member.elements],
                member.state.staged_error,
            )
        self._state.are_finite = torch.stack(are_finite)
        if self._tracer.samples:
            staged = [member.state.staged_error for member in self._members]
            self._tracer.measure(lambda: {"residual of what is sent": torch.cat(staged).norm()}, self._name)

    def _first_rights(self, step: str) -> torch.Tensor:
        firsts = [first_factor(member.seed + step, member.right.rank * member.right.length) for member in self._members]
        return torch.cat(firsts).to(self._device)
