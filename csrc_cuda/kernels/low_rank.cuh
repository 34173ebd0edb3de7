// Low-rank gradients on CUDA: the Gram-Schmidt process and products of two factors; element/low_rank.h has the
// arithmetic. nvcc and NVRTC compile this file unchanged, with --fmad=false. A thread block processes one row of the
// table after the other. As in the codecs, the kernels check the content of tables.
#pragma once

#include "../element/low_rank.h"
#include "blocks.cuh"

namespace torchbagua::cuda {

static_assert(kPieceLanes == kWarpThreads, "a warp sums the lanes of a piece");

__device__ __forceinline__ void require(bool is_inside) {
  if (!is_inside) {
    __trap();
  }
}

// The value of the thread in this warp whose lane differs in the bits of `mask`.
__device__ __forceinline__ double exchange(double value, int mask) {
  union {
    double whole;
    unsigned int halves[2];
  } parts;
  parts.whole = value;
  parts.halves[0] = __shfl_xor_sync(0xffffffffu, parts.halves[0], mask);
  parts.halves[1] = __shfl_xor_sync(0xffffffffu, parts.halves[1], mask);
  return parts.whole;
}

// Run by the threads of a warp; all of them get the result.
__device__ __forceinline__ double inner_product(const float* a, const float* b, long long length) {
  double sum = 0.0;
  for (int i = threadIdx.x % kWarpThreads; i < length; i += kWarpThreads) {
    sum += product(a[i], b[i]);
  }
  for (int width = kWarpThreads / 2; width > 0; width /= 2) {
    sum += exchange(sum, width);
  }
  return sum;
}

// Each warp processes one pair of vectors after the other.
__device__ __forceinline__ void multiply_vectors(const Piece& piece, const float* factors, double* products) {
  const float* vectors = factors + piece.start;
  const int num_warps = blockDim.x / kWarpThreads;
  int turn = threadIdx.x / kWarpThreads;
  for (int i = 0; i < piece.rank; ++i) {
    for (int j = 0; j <= i; ++j) {
      if (turn == 0) {
        const double sum = inner_product(vectors + i * piece.stride, vectors + j * piece.stride, piece.length);
        if (threadIdx.x % kWarpThreads == 0) {
          products[entry(i, j)] = sum;
        }
      }
      turn = turn == 0 ? num_warps - 1 : turn - 1;
    }
  }
}

__device__ __forceinline__ void solve(const PieceRange& range, const Grid<const double>& products, double* inverse) {
  double* triangle = inverse + num_entries(range.rank);
  for (long long at = threadIdx.x; at < num_entries(range.rank); at += blockDim.x) {
    double sum = 0.0;
    for (long long piece = 0; piece < range.count; ++piece) {
      sum += products.row(range.first + piece)[at];
    }
    triangle[at] = sum;
  }
  __syncthreads();
  for (long long j = 0; j < range.rank; ++j) {
    const double by = inverse_length(rest_of_entry(triangle, j, j), triangle[entry(j, j)]);
    for (long long i = j + 1 + threadIdx.x; i < range.rank; i += blockDim.x) {
      triangle[entry(i, j)] = rest_of_entry(triangle, i, j) * by;
    }
    if (threadIdx.x == 0) {
      inverse[entry(j, j)] = by;
    }
    __syncthreads();
  }
  for (long long j = threadIdx.x; j < range.rank; j += blockDim.x) {
    invert_column(triangle, inverse, range.rank, j);
  }
  __syncthreads();
}

// Starts with the last vector, since each vector needs the original vectors before it.
__device__ __forceinline__ void combine(const Piece& piece, const double* coefficients, float* factors) {
  float* vectors = factors + piece.start;
  for (long long at = threadIdx.x; at < piece.length; at += blockDim.x) {
    for (long long i = piece.rank - 1; i >= 0; --i) {
      double sum = 0.0;
      for (long long j = 0; j <= i; ++j) {
        sum += coefficients[entry(i, j)] * static_cast<double>(vectors[j * piece.stride + at]);
      }
      vectors[i * piece.stride + at] = static_cast<float>(sum);
    }
  }
}

__device__ __forceinline__ void multiply_rows(const ProductRows& of, const float* left, const float* right,
                                              float* values, float* left_out) {
  left += of.left_start;
  right += of.right_start;
  for (long long row = 0; row < of.num_rows; ++row) {
    const long long start = of.start + row * of.columns;
    for (long long i = threadIdx.x; i < of.columns; i += blockDim.x) {
      float sum = 0.0f;
      for (long long k = 0; k < of.rank; ++k) {
        sum += left[k * of.left_stride + row] * right[k * of.columns + i];
      }
      values[start + i] = sum;
      left_out[start + i] -= sum;
    }
  }
}

// --- Kernels: extern "C" and not templates, since NVRTC's callers look up a kernel by its plain name ---

#define TORCHBAGUA_KERNEL extern "C" __global__ void __launch_bounds__(kThreads)

TORCHBAGUA_KERNEL torchbagua_low_rank_gram(Span<const float> factors, RowTable<Piece> table, Grid<double> products) {
  for (long long index = blockIdx.x; index < table.num_rows; index += gridDim.x) {
    const Piece& piece = table.rows[index];
    require(is_inside(piece, factors.size, kAnyMatrix, products.row_size));
    multiply_vectors(piece, factors.data, products.row(index));
  }
}

TORCHBAGUA_KERNEL torchbagua_low_rank_solve(Grid<const double> products, RowTable<PieceRange> table,
                                            Grid<double> coefficients) {
  for (long long index = blockIdx.x; index < table.num_rows; index += gridDim.x) {
    const PieceRange& range = table.rows[index];
    require(is_inside(range, products.num_rows, products.row_size, coefficients.row_size));
    solve(range, products, coefficients.row(index));
  }
}

TORCHBAGUA_KERNEL torchbagua_low_rank_combine(Grid<const double> coefficients, RowTable<Piece> table,
                                              Span<float> factors) {
  for (long long index = blockIdx.x; index < table.num_rows; index += gridDim.x) {
    const Piece& piece = table.rows[index];
    require(is_inside(piece, factors.size, coefficients.num_rows, coefficients.row_size));
    combine(piece, coefficients.row(piece.matrix), factors.data);
  }
}

TORCHBAGUA_KERNEL torchbagua_low_rank_product(Span<const float> left, Span<const float> right,
                                              RowTable<ProductRows> table, Span<float> values, Span<float> left_out) {
  for (long long index = blockIdx.x; index < table.num_rows; index += gridDim.x) {
    const ProductRows& rows = table.rows[index];
    require(is_inside(rows, left.size, right.size, values.size));
    multiply_rows(rows, left.data, right.data, values.data, left_out.data);
  }
}

#undef TORCHBAGUA_KERNEL

}  // namespace torchbagua::cuda
