// Low-rank gradients on the CPU: loops over element/low_rank.h, on several threads, like the matrix products around
// them. Tables are checked before anything is written.
#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "blocks.h"
#include "instruction_set.h"
#include "low_rank_ops.h"

namespace torchbagua::cpu {

static_assert(kLanes == kPieceLanes, "fold_lanes folds them");

// The compiler's vector types, up to the width of an AVX2 register: sums stay in registers, unlike sums in arrays.
using Floats4 = float __attribute__((vector_size(16)));
using Floats8 = float __attribute__((vector_size(32)));
using Doubles4 = double __attribute__((vector_size(32)));

// The elements of each vector that are processed together.
constexpr int kStripe = 8;
constexpr int kParts = 2;

TORCHBAGUA_ELEMENT void load(const float* from, Doubles4 (&values)[kParts]) {
  for (int part = 0; part < kParts; ++part) {
    Floats4 floats;
    std::memcpy(&floats, from + 4 * part, sizeof(floats));
    values[part] = __builtin_convertvector(floats, Doubles4);
  }
}

// The inner products of `a` with kCount vectors, which begin `stride` apart from `b` on.
template <int kCount>
TORCHBAGUA_ELEMENT void inner_products(const float* a, const float* b, long long stride, long long length,
                                       double* products) {
  double lanes[kCount][kLanes];
  const long long whole = length / kLanes * kLanes;
  for (long long stripe = 0; stripe < kLanes; stripe += kStripe) {
    Doubles4 sums[kCount][kParts] = {};
    for (long long first = stripe; first < whole; first += kLanes) {
      Doubles4 own[kParts], other[kParts];
      load(a + first, own);
      for (int k = 0; k < kCount; ++k) {
        load(b + k * stride + first, other);
        for (int part = 0; part < kParts; ++part) {
          sums[k][part] += own[part] * other[part];
        }
      }
    }
    for (int k = 0; k < kCount; ++k) {
      std::memcpy(&lanes[k][stripe], sums[k], sizeof(sums[k]));
    }
  }
  for (int k = 0; k < kCount; ++k) {
    double* own = lanes[k];
    for (long long i = whole; i < length; ++i) {
      own[i - whole] += product(a[i], b[k * stride + i]);
    }
    fold_lanes([=](long long i, long long j) TORCHBAGUA_INLINED { own[i] += own[j]; });
    products[k] = own[0];
  }
}

TORCHBAGUA_ELEMENT void multiply_vectors(const Piece& piece, const float* factors, double* products) {
  constexpr int kAtOnce = 4;
  const float* vectors = factors + piece.start;
  for (long long i = 0; i < piece.rank; ++i) {
    const float* own = vectors + i * piece.stride;
    double* out = products + entry(i, 0);
    long long j = 0;
    for (; j + kAtOnce <= i + 1; j += kAtOnce) {
      inner_products<kAtOnce>(own, vectors + j * piece.stride, piece.stride, piece.length, out + j);
    }
    for (; j <= i; ++j) {
      inner_products<1>(own, vectors + j * piece.stride, piece.stride, piece.length, out + j);
    }
  }
}

inline void solve(const PieceRange& range, const Grid<const double>& products, double* inverse) {
  double* triangle = inverse + num_entries(range.rank);
  for (long long at = 0; at < num_entries(range.rank); ++at) {
    double sum = 0.0;
    for (long long piece = 0; piece < range.count; ++piece) {
      sum += products.row(range.first + piece)[at];
    }
    triangle[at] = sum;
  }
  for (long long j = 0; j < range.rank; ++j) {
    const double by = inverse_length(rest_of_entry(triangle, j, j), triangle[entry(j, j)]);
    inverse[entry(j, j)] = by;
    for (long long i = j + 1; i < range.rank; ++i) {
      triangle[entry(i, j)] = rest_of_entry(triangle, i, j) * by;
    }
  }
  for (long long j = 0; j < range.rank; ++j) {
    invert_column(triangle, inverse, range.rank, j);
  }
}

// Combines the vectors [first, first + kCount) of a stripe of a piece. All sums are in the order of the vectors.
template <int kCount>
TORCHBAGUA_ELEMENT void combine_vectors(long long first, const double* coefficients, long long stride, float* vectors) {
  Doubles4 sums[kCount][kParts] = {};
  for (long long j = 0; j <= first; ++j) {
    Doubles4 vector[kParts];
    load(vectors + j * stride, vector);
    for (int k = 0; k < kCount; ++k) {
      const double by = coefficients[entry(first + k, j)];
      for (int part = 0; part < kParts; ++part) {
        sums[k][part] += by * vector[part];
      }
    }
  }
  for (int j = 1; j < kCount; ++j) {
    Doubles4 vector[kParts];
    load(vectors + (first + j) * stride, vector);
    for (int k = j; k < kCount; ++k) {
      const double by = coefficients[entry(first + k, first + j)];
      for (int part = 0; part < kParts; ++part) {
        sums[k][part] += by * vector[part];
      }
    }
  }
  for (int k = 0; k < kCount; ++k) {
    for (int part = 0; part < kParts; ++part) {
      const Floats4 values = __builtin_convertvector(sums[k][part], Floats4);
      std::memcpy(vectors + (first + k) * stride + 4 * part, &values, sizeof(values));
    }
  }
}

// Starts with the last vectors, since each vector needs the original vectors before it.
TORCHBAGUA_ELEMENT void combine(const Piece& piece, const double* coefficients, float* factors) {
  constexpr int kAtOnce = 4;
  float* vectors = factors + piece.start;
  const long long whole = piece.length / kStripe * kStripe;
  for (long long at = 0; at < whole; at += kStripe) {
    long long end = piece.rank;
    for (; end >= kAtOnce; end -= kAtOnce) {
      combine_vectors<kAtOnce>(end - kAtOnce, coefficients, piece.stride, vectors + at);
    }
    for (; end > 0; --end) {
      combine_vectors<1>(end - 1, coefficients, piece.stride, vectors + at);
    }
  }
  for (long long at = whole; at < piece.length; ++at) {
    for (long long i = piece.rank - 1; i >= 0; --i) {
      double sum = 0.0;
      for (long long j = 0; j <= i; ++j) {
        sum += coefficients[entry(i, j)] * static_cast<double>(vectors[j * piece.stride + at]);
      }
      vectors[i * piece.stride + at] = static_cast<float>(sum);
    }
  }
}

// The elements of one row of a product that are processed together.
constexpr int kRowStripe = 64;

TORCHBAGUA_ELEMENT void multiply_stripe(const ProductRows& of, const float* left, const float* right, float* values,
                                        float* left_out) {
  constexpr int kRowParts = kRowStripe / 8;
  Floats8 sums[kRowParts] = {};
  for (long long k = 0; k < of.rank; ++k) {
    const float by = left[k * of.left_stride];
    for (int part = 0; part < kRowParts; ++part) {
      Floats8 others;
      std::memcpy(&others, right + k * of.columns + 8 * part, sizeof(others));
      sums[part] += by * others;
    }
  }
  for (int part = 0; part < kRowParts; ++part) {
    Floats8 rest;
    std::memcpy(&rest, left_out + 8 * part, sizeof(rest));
    rest -= sums[part];
    std::memcpy(values + 8 * part, &sums[part], sizeof(rest));
    std::memcpy(left_out + 8 * part, &rest, sizeof(rest));
  }
}

// Row by row: data that is read and written once is accessed in memory order, and the right factor stays in the cache.
TORCHBAGUA_ELEMENT void multiply_rows(const ProductRows& of, const float* left, const float* right, float* values,
                                      float* left_out) {
  const long long whole = of.columns / kRowStripe * kRowStripe;
  left += of.left_start;
  right += of.right_start;
  for (long long row = 0; row < of.num_rows; ++row) {
    const long long start = of.start + row * of.columns;
    for (long long i = 0; i < whole; i += kRowStripe) {
      multiply_stripe(of, left + row, right + i, values + start + i, left_out + start + i);
    }
    for (long long i = whole; i < of.columns; ++i) {
      float sum = 0.0f;
      for (long long k = 0; k < of.rank; ++k) {
        sum += left[k * of.left_stride + row] * right[k * of.columns + i];
      }
      values[start + i] = sum;
      left_out[start + i] -= sum;
    }
  }
}

struct LowRankOnCpu {
  using Call = binding::Call;

  static constexpr auto kDevice = binding::DeviceType::CPU;

  static void gram(const Call& call, Span<const float> factors, RowTable<Piece> table, Grid<double> products) {
    check(call, table,
          [&](const Piece& piece) { return is_inside(piece, factors.size, kAnyMatrix, products.row_size); });
    in_parallel(table, [=](long long piece) TORCHBAGUA_INLINED {
      multiply_vectors(table.rows[piece], factors.data, products.row(piece));
    });
  }

  static void solve(const Call& call, Grid<const double> products, RowTable<PieceRange> table,
                    Grid<double> coefficients) {
    check(call, table, [&](const PieceRange& range) {
      return is_inside(range, products.num_rows, products.row_size, coefficients.row_size);
    });
    for (long long matrix = 0; matrix < table.num_rows; ++matrix) {
      cpu::solve(table.rows[matrix], products, coefficients.row(matrix));
    }
  }

  static void combine(const Call& call, Grid<const double> coefficients, RowTable<Piece> table, Span<float> factors) {
    check(call, table, [&](const Piece& piece) {
      return is_inside(piece, factors.size, coefficients.num_rows, coefficients.row_size);
    });
    in_parallel(table, [=](long long piece) TORCHBAGUA_INLINED {
      const Piece& of = table.rows[piece];
      cpu::combine(of, coefficients.row(of.matrix), factors.data);
    });
  }

  static void product(const Call& call, Span<const float> left, Span<const float> right, RowTable<ProductRows> table,
                      Span<float> values, Span<float> left_out) {
    check(call, table, [&](const ProductRows& rows) { return is_inside(rows, left.size, right.size, values.size); });
    in_parallel(table, [=](long long rows) TORCHBAGUA_INLINED {
      multiply_rows(table.rows[rows], left.data, right.data, values.data, left_out.data);
    });
  }

  template <typename Row, typename IsGood>
  static void check(const Call& call, const RowTable<Row>& table, const IsGood& is_good) {
    for (long long index = 0; index < table.num_rows; ++index) {
      if (!is_good(table.rows[index])) {
        refuse(call, "table", "rows that lie within the other tensors",
               binding::text_of("row ", index, " outside them"));
      }
    }
  }

  // Calls `body(index)` for all rows, on several threads.
  template <typename Row, typename Body>
  static void in_parallel(const RowTable<Row>& table, const Body& body) {
    constexpr int64_t kGrain = 16;  // fewer are not worth waking a thread
    torch::stable::parallel_for(0, table.num_rows, kGrain, [&](int64_t begin, int64_t end) {
      run_under(kInstructionSet, [&]() TORCHBAGUA_INLINED {
        for (int64_t index = begin; index < end; ++index) {
          body(index);
        }
      });
    });
  }
};

}  // namespace torchbagua::cpu

STABLE_TORCH_LIBRARY_IMPL(torchbagua, CPU, library) {
  torchbagua::binding::LowRankOps<torchbagua::cpu::LowRankOnCpu>::register_in(library);
}
