// Low-rank gradients: the Gram-Schmidt process and products of two factors; docs/arithmetic.md has the formulas. A
// factor of rank r is r vectors, one after the other. Freestanding, like casts.h; bitwise equal results everywhere.
#pragma once

#include "blocks.h"

namespace torchbagua {

// The vectors of a factor are divided into pieces of this many elements; the last piece may be shorter.
constexpr long long kPieceElements = 1024;

// The lanes of a sum over a piece: lane l sums the elements l, l + 32, and so on; then the lanes are summed by halves.
constexpr long long kPieceLanes = 32;

// Beyond this rank, numbers of pairs might overflow.
constexpr long long kLargestRank = 1 << 15;

// Pass as the number of matrices if `matrix` is not used.
constexpr long long kAnyMatrix = 1LL << 62;

// The same elements of all vectors of a factor; torchbagua/native/low_rank.py documents these fields.
struct Piece {
  long long start;
  long long stride;
  long long rank;
  long long length;
  long long matrix;
};

// The pieces of one factor.
struct PieceRange {
  long long first;
  long long count;
  long long rank;
};

// Consecutive rows of the product of two factors.
struct ProductRows {
  long long start;
  long long num_rows;
  long long columns;
  long long rank;
  long long left_start;
  long long left_stride;
  long long right_start;
};

// The rows of a table, which is a two-dimensional tensor.
template <typename Row>
struct RowTable {
  const Row* rows;
  long long num_rows;
  long long num_fields;  // unused, as in Table
};

// A two-dimensional tensor.
template <typename T>
struct Grid {
  T* data;
  long long num_rows;
  long long row_size;

  TORCHBAGUA_ELEMENT T* row(long long index) const { return data + index * row_size; }
};

// The index of the entry in row i and column j <= i in the lower triangle of a matrix.
TORCHBAGUA_ELEMENT long long entry(long long i, long long j) { return i * (i + 1) / 2 + j; }

TORCHBAGUA_ELEMENT long long num_entries(long long rank) { return entry(rank, 0); }

// Whether `rank` vectors of `length` elements lie within `size` elements; each begins `stride` after the previous one.
TORCHBAGUA_ELEMENT bool vectors_lie_within(long long start, long long stride, long long rank, long long length,
                                           long long size) {
  return rank >= 1 && rank <= kLargestRank && stride >= 0 && lies_within(start, length, size) &&
         (stride == 0 || rank - 1 <= (size - start - length) / stride);
}

TORCHBAGUA_ELEMENT bool is_inside(const Piece& piece, long long size, long long num_matrices, long long row_size) {
  return piece.length <= kPieceElements &&
         vectors_lie_within(piece.start, piece.stride, piece.rank, piece.length, size) &&
         num_entries(piece.rank) <= row_size && lies_within(piece.matrix, 1, num_matrices);
}

TORCHBAGUA_ELEMENT bool is_inside(const PieceRange& range, long long num_pieces, long long row_size,
                                  long long coefficients_size) {
  return lies_within(range.first, range.count, num_pieces) && range.rank >= 1 && range.rank <= kLargestRank &&
         num_entries(range.rank) <= row_size && 2 * num_entries(range.rank) <= coefficients_size;
}

TORCHBAGUA_ELEMENT bool is_inside(const ProductRows& rows, long long left_size, long long right_size, long long size) {
  return rows.columns >= 1 && lies_within(rows.start, rows.num_rows, size) &&
         rows.num_rows <= (size - rows.start) / rows.columns &&
         vectors_lie_within(rows.left_start, rows.left_stride, rows.rank, rows.num_rows, left_size) &&
         vectors_lie_within(rows.right_start, rows.columns, rows.rank, rows.columns, right_size);
}

// Exact, since the factors are floats.
TORCHBAGUA_ELEMENT double product(float a, float b) { return static_cast<double>(a) * static_cast<double>(b); }

// The reciprocal length of the part of a vector that is orthogonal to the vectors before it; 0, which removes the
// vector, if that part is too short to be more than rounding; NaN if a vector has Inf or NaN.
TORCHBAGUA_ELEMENT double inverse_length(double square_of_part, double square) {
  constexpr double kLargest = 1.7976931348623157e308;
  constexpr double kShortest = 9.094947017729282e-13;  // 2^-40: the part's length is 2^-20 of the vector's
  if (!(square <= kLargest) || !(square_of_part <= kLargest)) {
    return static_cast<double>(not_a_number());
  }
  if (!(square_of_part > square * kShortest)) {
    return 0.0;
  }
#if defined(__CUDA_ARCH__)
  return 1.0 / __dsqrt_rn(square_of_part);
#else
  return 1.0 / __builtin_sqrt(square_of_part);
#endif
}

// The Cholesky decomposition G = L L^T, in place in the lower triangle of G, column by column: the remainder of the
// entry (i, j) after the columns before j.
TORCHBAGUA_ELEMENT double rest_of_entry(const double* triangle, long long i, long long j) {
  double rest = triangle[entry(i, j)];
  for (long long k = 0; k < j; ++k) {
    rest -= triangle[entry(i, k)] * triangle[entry(j, k)];
  }
  return rest;
}

// Computes column j of the inverse of L; its diagonal must already be there.
TORCHBAGUA_ELEMENT void invert_column(const double* triangle, double* inverse, long long rank, long long j) {
  for (long long i = j + 1; i < rank; ++i) {
    double sum = 0.0;
    for (long long k = j; k < i; ++k) {
      sum += triangle[entry(i, k)] * inverse[entry(k, j)];
    }
    inverse[entry(i, j)] = -(sum * inverse[entry(i, i)]);
  }
}

}  // namespace torchbagua
