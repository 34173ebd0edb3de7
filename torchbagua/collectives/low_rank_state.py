"""State of matrices whose mean has low rank: residuals and right factors, staged and committed.

Shape suffixes: N elements of a bucket.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch


class MatrixShape(NamedTuple):
    """The shape of a matrix in row-major order, `rows` by `columns`, and the rank of the product that replaces it."""

    rows: int
    columns: int
    rank: int


def matrix_shape(shape: Sequence[int], num_elements: int, rank: int, min_rate: float) -> MatrixShape | None:
    """Return a tensor as a matrix whose rows are the first dimension; None if the factors are not much smaller.

    Args:
        shape: the shape of the tensor, starting with the dimension that varies slowest in memory.
        num_elements: the number of its real numbers.
        rank: the largest number of vectors in a factor.
        min_rate: the matrix must have more than this many times the elements of its factors.
    """
    if len(shape) < 2 or num_elements == 0:
        return None
    rows, columns = shape[0], num_elements // shape[0]
    own_rank = min(rank, rows, columns)
    is_smaller = num_elements > min_rate * own_rank * (rows + columns)
    return MatrixShape(rows, columns, own_rank) if is_smaller else None


class MatrixState:
    """The state of one matrix: the residual, the right factor of the last step, and the staged values of both.

    Args:
        shape: the shape of the matrix.
        error: [rows * columns], the residual of the factors.
        right: [rank * columns]; empty if each step begins with a new right factor.
    """

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

    Args:
        lengths: the number of elements of each parameter in the bucket.
        shapes: the shapes of the parameters' matrices; None for a parameter that is sent without factors.
        device: the device of the bucket.
        held: residual and right factor of each parameter, flat; zeros if it has none yet. None if no parameter has any.
        keeps_right: whether right factors are kept.

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
