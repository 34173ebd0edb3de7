"""Low-rank gradients in plain torch: the Gram-Schmidt process and products of factors; see docs/arithmetic.md.

A *factor* of rank r is r vectors of equal length, float32, stored one after the other. The factors of several matrices
share one tensor. The Gram-Schmidt process over all of them is three operations, each of which is one launch on a GPU:

1. `gram`: the inner products of the vectors, in float64, for each *piece* of up to 1024 elements.
2. `solve`: sums the inner products over the pieces and computes the coefficients that orthonormalize the vectors: the
   inverse of the Cholesky factor. A vector that depends linearly on the vectors before it gets zeros.
3. `combine`: replaces the vectors by the linear combinations, in place.

Tables are int64 tensors on the device of the data, with one row per piece, matrix or part of a product:

- pieces [T, 5]: `start`, the offset of its first element in the first vector; `stride`, from one vector to the next;
  `rank`; `length`; `matrix`, the row of its coefficients.
- matrices [B, 3]: `first` and `count`, its pieces; `rank`.
- products [U, 7]: `start`, the offset of its first element in the product; `rows` and `columns`; `rank`; `left_start`
  and `left_stride`, as `start` and `stride` of a piece, of the left factor; `right_start`, the offset of the right
  factor.

The rows of one table must not write overlapping ranges.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from torchbagua.native.ops import FLOATS, TensorKind, check_arguments, define_op, refusal

# As in csrc_cuda/element/low_rank.h.
PIECE_ELEMENTS = 1024
_LANES = 32
_LARGEST_RANK = 2**15
_SHORTEST = 2.0**-40
_LARGEST = torch.finfo(torch.float64).max

_GRID = TensorKind((torch.float64,), ("R", "W"))
_PIECES = TensorKind((torch.int64,), ("T", 5))
_MATRICES = TensorKind((torch.int64,), ("B", 3))
_PRODUCTS = TensorKind((torch.int64,), ("U", 7))


def num_entries(rank: int) -> int:
    """Return the number of entries in the lower triangle of a matrix of `rank` rows, with its diagonal."""
    return rank * (rank + 1) // 2


def gram(factors: Tensor, table: Tensor, products: Tensor) -> None:
    """Write the inner products of the vectors of each piece to `products` [T, W], as a lower triangle, row by row."""
    pieces = _pieces_within("gram", table, factors, products, 2**62)  # `gram` does not read `matrix`
    for index, (start, stride, rank, length, _) in enumerate(pieces):
        padded = factors.new_zeros(rank, -(-length // _LANES) * _LANES, dtype=torch.float64)
        padded[:, :length] = factors.as_strided((rank, length), (stride, 1), start)
        terms = padded.view(rank, -1, _LANES)
        for i in range(rank):
            lanes = factors.new_zeros(i + 1, _LANES, dtype=torch.float64)
            for step in range(terms.shape[1]):
                lanes += terms[i, step] * terms[: i + 1, step]
            while lanes.shape[1] > 1:
                half = lanes.shape[1] // 2
                lanes = lanes[:, :half] + lanes[:, half:]
            products[index, num_entries(i) : num_entries(i + 1)] = lanes[:, 0]


def solve(products: Tensor, table: Tensor, coefficients: Tensor) -> None:
    """Write to `coefficients` [B, W] the coefficients that orthonormalize the vectors of each matrix.

    They are the inverse of the Cholesky factor, then the factor, both as the entries of a lower triangle.
    """
    rows = _rows_within(
        "solve",
        table,
        lambda first, count, rank: (
            _lies_within(first, count, len(products))
            and 1 <= rank <= _LARGEST_RANK
            and num_entries(rank) <= products.shape[1]
            and 2 * num_entries(rank) <= coefficients.shape[1]
        ),
    )
    for index, (first, count, rank) in enumerate(rows):
        total = products.new_zeros(num_entries(rank))
        for piece in products[first : first + count, : num_entries(rank)]:
            total += piece
        inverse, triangle = _inverse_of(total.tolist(), rank)
        coefficients[index, : 2 * num_entries(rank)] = torch.tensor(inverse + triangle, dtype=torch.float64)


def _inverse_of(triangle: list[float], rank: int) -> tuple[list[float], list[float]]:
    """Return the inverse of the Cholesky factor, and the factor (its diagonal is not used), as Python floats."""
    inverse = [0.0] * len(triangle)
    starts = [num_entries(i) for i in range(rank)]
    for j in range(rank):
        by = _inverse_length(_rest(triangle, starts[j], starts[j], j), triangle[starts[j] + j])
        inverse[starts[j] + j] = by
        for i in range(j + 1, rank):
            triangle[starts[i] + j] = _rest(triangle, starts[i], starts[j], j) * by
    for j in range(rank):
        for i in range(j + 1, rank):
            total = 0.0
            for k in range(j, i):
                total += triangle[starts[i] + k] * inverse[starts[k] + j]
            inverse[starts[i] + j] = -(total * inverse[starts[i] + i])
    return inverse, triangle


def _rest(triangle: list[float], row: int, other: int, column: int) -> float:
    rest = triangle[row + column]
    for k in range(column):
        rest -= triangle[row + k] * triangle[other + k]
    return rest


def _inverse_length(square_of_part: float, square: float) -> float:
    if not (square <= _LARGEST and square_of_part <= _LARGEST):
        return math.nan
    return 1.0 / math.sqrt(square_of_part) if square_of_part > square * _SHORTEST else 0.0


def combine(coefficients: Tensor, table: Tensor, factors: Tensor) -> None:
    """Replace the vectors of each piece by their linear combinations, computed in float64."""
    pieces = _pieces_within("combine", table, factors, coefficients, len(coefficients))
    for start, stride, rank, length, matrix in pieces:
        vectors = factors.as_strided((rank, length), (stride, 1), start)
        before = vectors.double()
        for i in range(rank):
            total = torch.zeros_like(before[0])
            for j in range(i + 1):
                total += before[j] * coefficients[matrix, num_entries(i) + j]
            vectors[i] = total


def product(left: Tensor, right: Tensor, table: Tensor, values: Tensor, left_out: Tensor) -> None:
    """Write the transposed left factor times the right factor to `values`, and subtract it from `left_out`.

    The terms are summed in the order of the vectors, in float32.
    """
    rows = _rows_within(
        "product",
        table,
        lambda start, num_rows, columns, rank, left_start, left_stride, right_start: (
            columns >= 1
            and _lies_within(start, num_rows, len(values))
            and _lies_within(start, num_rows * columns, len(values))
            and _vectors_lie_within(left_start, left_stride, rank, num_rows, len(left))
            and _vectors_lie_within(right_start, columns, rank, columns, len(right))
        ),
    )
    for start, num_rows, columns, rank, left_start, left_stride, right_start in rows:
        left_vectors = left.as_strided((rank, num_rows), (left_stride, 1), left_start)
        right_vectors = right.as_strided((rank, columns), (columns, 1), right_start)
        total = values.new_zeros(num_rows, columns)
        for left_vector, right_vector in zip(left_vectors, right_vectors, strict=True):
            total += left_vector[:, None] * right_vector
        elements = slice(start, start + num_rows * columns)
        values[elements] = total.view(-1)
        left_out[elements] -= total.view(-1)


def _rows_within(operation: str, table: Tensor, lies_within: Callable[..., bool]) -> list[list[int]]:
    """Return the rows of a table; ValueError for a row that does not lie within the other tensors."""
    rows: list[list[int]] = table.tolist()
    for index, row in enumerate(rows):
        if not lies_within(*row):
            allowed = "rows that lie within the other tensors"
            raise refusal(f"low_rank_{operation}", "table", allowed, f"row {index} outside them")
    return rows


def _pieces_within(operation: str, table: Tensor, factors: Tensor, grid: Tensor, num_matrices: int) -> list[list[int]]:
    """Return the rows of a table of pieces of `factors`; a row of `grid` contains a lower triangle for each piece."""
    return _rows_within(
        operation,
        table,
        lambda start, stride, rank, length, matrix: (
            length <= PIECE_ELEMENTS
            and _vectors_lie_within(start, stride, rank, length, len(factors))
            and num_entries(rank) <= grid.shape[1]
            and 0 <= matrix < num_matrices
        ),
    )


def _lies_within(first: int, length: int, size: int) -> bool:
    return first >= 0 and length >= 0 and first + length <= size


def _vectors_lie_within(start: int, stride: int, rank: int, length: int, size: int) -> bool:
    is_rank = 1 <= rank <= _LARGEST_RANK
    return is_rank and stride >= 0 and start >= 0 and length >= 0 and start + (rank - 1) * stride + length <= size


def _check_gram(factors: Tensor, table: Tensor, products: Tensor) -> None:
    kinds = {"factors": FLOATS, "table": _PIECES, "products": _GRID}
    check_arguments("low_rank_gram", kinds, factors, table, products)
    _check_num_rows("gram", "products", products, table)


def _check_solve(products: Tensor, table: Tensor, coefficients: Tensor) -> None:
    kinds = {"products": _GRID, "table": _MATRICES, "coefficients": _GRID._replace(shape=("R", "V"))}
    check_arguments("low_rank_solve", kinds, products, table, coefficients)
    _check_num_rows("solve", "coefficients", coefficients, table)


def _check_combine(coefficients: Tensor, table: Tensor, factors: Tensor) -> None:
    kinds = {"coefficients": _GRID, "table": _PIECES, "factors": FLOATS}
    check_arguments("low_rank_combine", kinds, coefficients, table, factors)


def _check_product(left: Tensor, right: Tensor, table: Tensor, values: Tensor, left_out: Tensor) -> None:
    result = FLOATS._replace(shape=("V",))
    kinds = {"left": FLOATS, "right": FLOATS._replace(shape=("M",)), "table": _PRODUCTS}
    check_arguments(
        "low_rank_product", kinds | {"values": result, "left_out": result}, left, right, table, values, left_out
    )


def _check_num_rows(operation: str, name: str, grid: Tensor, table: Tensor) -> None:
    if len(grid) != len(table):
        raise refusal(f"low_rank_{operation}", name, f"a tensor of {len(table)} rows, like table", list(grid.shape))


define_op("low_rank", "gram", _check_gram, gram, ("products",))
define_op("low_rank", "solve", _check_solve, solve, ("coefficients",))
define_op("low_rank", "combine", _check_combine, combine, ("factors",))
define_op("low_rank", "product", _check_product, product, ("values", "left_out"))
