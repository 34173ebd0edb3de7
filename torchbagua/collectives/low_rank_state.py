"""What is kept of matrices whose mean is one of low rank: errors and right factors, staged and committed.

Shape suffixes: N elements of a bucket.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch


class MatrixShape(NamedTuple):
    """A matrix of `rows` and `columns`, which lies row by row, and the rank of what takes its place."""

    rows: int
    columns: int
    rank: int


def matrix_shape(shape: Sequence[int], num_elements: int, rank: int, min_rate: float) -> MatrixShape | None:
    """Return the matrix of a tensor, whose first dimension are its rows; None if factors are not much smaller.

    Args:
        shape: of the tensor, the dimension first that lies slowest in memory.
        num_elements: its real numbers.
        rank: the most vectors that a factor may have.
        min_rate: how many times fewer the elements of the factors must be than those of the matrix.
    """
    if len(shape) < 2 or num_elements == 0:
        return None
    rows, columns = shape[0], num_elements // shape[0]
    own_rank = min(rank, rows, columns)
    is_smaller = num_elements > min_rate * own_rank * (rows + columns)
    return MatrixShape(rows, columns, own_rank) if is_smaller else None


class MatrixState:
    """What is kept of one matrix: the error, and the right factor of the last step; and what is staged of both.

    Args:
        shape: of the matrix.
        error: [rows * columns], what factors have left out.
        right: [rank * columns], or nothing where each step begins with another one.
    """

    def __init__(self, shape: MatrixShape, error: torch.Tensor, right: torch.Tensor) -> None:
        self.shape = shape
        self.error, self.right = error, right
        self.staged_error, self.staged_right = torch.zeros_like(error), torch.zeros_like(right)
        self.is_staged = False
        self.is_continued = False

    @property
    def base(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The error and the right factor that the next step starts from."""
        return (self.staged_error, self.staged_right) if self.is_continued else (self.error, self.right)

    def commit(self) -> None:
        """Keep what is staged."""
        self.error, self.staged_error = self.staged_error, self.error
        self.right, self.staged_right = self.staged_right, self.right
        self.is_staged = self.is_continued = False


class LowRankState:
    """What is kept of the parameters of one bucket: errors and right factors; see `BucketState`.

    Memory: 8 bytes an element of a matrix.

    Args:
        lengths: how many elements each parameter has in the bucket.
        shapes: of their matrices; None for a parameter that is sent as it is.
        device: of the bucket.
        held: error and right factor of each parameter, flat; zeros where there is none yet. None if there is nothing of
            any.
        keeps_right: whether right factors are kept.

    Attributes:
        keeps_right: the same.
        matrices: a state for each parameter, None for one that is sent as it is.
        are_finite: whether what is staged is finite, one bool for each matrix; None before there is anything, and
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
        """Prepare for the next backward; gradients still contain averages in these parts."""
        for own, matrix in zip(self._parts, self.matrices, strict=True):
            if matrix is not None:
                matrix.is_continued = matrix.is_staged and _is_within(own, parts)

    def unstage(self, is_used_N: torch.Tensor) -> None:
        """Stage what is kept of those matrices that are not finite, or for whose elements `is_used_N` is False."""
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
        """Keep what is staged of these parts, by default of all, where it is finite."""
        are_finite = itertools.repeat(True) if self.are_finite is None else iter(self.are_finite.tolist())
        for own, matrix in zip(self._parts, self.matrices, strict=True):
            if matrix is None:
                continue
            is_finite = next(are_finite)
            if matrix.is_staged and is_finite and (parts is None or _is_within(own, parts)):
                matrix.commit()

    def expand(self, part: slice) -> Sequence[torch.Tensor]:
        """Return what is kept of one parameter: its error and its right factor, flat."""
        matrix = self.matrices[self._parts.index(part)]
        if matrix is None:
            return torch.zeros(part.stop - part.start, device=self._device), torch.zeros(0, device=self._device)
        return matrix.error, matrix.right


def _is_within(own: slice, parts: Sequence[slice]) -> bool:
    return any(part.start <= own.start and own.stop <= part.stop for part in parts)
