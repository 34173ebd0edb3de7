// The low-rank operations on the dispatcher, over LibTorch's stable ABI; torchbagua/native/low_rank.py documents them.
// This file checks their arguments and converts them to what kernels take.
#pragma once

#include <torch/csrc/stable/library.h>

#include "arguments.h"
#include "element/low_rank.h"

namespace torchbagua::binding {

template <typename Row>
RowTable<Row> row_table_of(const Call& call, const Tensor& table) {
  constexpr int64_t kNumFields = sizeof(Row) / sizeof(long long);
  check(call, {"table", table}, table.scalar_type() == ScalarType::Long, "int64", {{"B"}, {nullptr, kNumFields}});
  return {static_cast<const Row*>(table.const_data_ptr()), table.size(0), table.size(1)};
}

// A float64 tensor [R, W] with `argument.size` rows; any number of rows if the size is negative.
inline Grid<double> grid_of(const Call& call, const Argument& argument) {
  const Tensor& tensor = argument.tensor;
  check(call, argument, tensor.scalar_type() == ScalarType::Double, "float64", {{"R", argument.size}, {"W"}});
  return {static_cast<double*>(tensor.mutable_data_ptr()), tensor.size(0), tensor.size(1)};
}

inline Grid<const double> const_grid_of(const Call& call, const Argument& argument) {
  const Tensor& tensor = argument.tensor;
  check(call, argument, tensor.scalar_type() == ScalarType::Double, "float64", {{"R", argument.size}, {"W"}});
  return {static_cast<const double*>(tensor.const_data_ptr()), tensor.size(0), tensor.size(1)};
}

// `Kernels` has kDevice, the device type, and a function for each operation, which takes the call and the arguments,
// with the content of tables unchecked.
template <typename Kernels>
struct LowRankOps {
  static Call call(const char* name, const Tensor& first) { return {{"low_rank", name}, Kernels::kDevice, first}; }

  static void gram(const Tensor& factors, const Tensor& table, const Tensor& products) {
    const Call called = call("gram", factors);
    const auto vectors = span_of<const float>(called, {"factors", factors});
    const auto pieces = row_table_of<Piece>(called, table);
    Kernels::gram(called, vectors, pieces, grid_of(called, {"products", products, pieces.num_rows}));
  }

  static void solve(const Tensor& products, const Tensor& table, const Tensor& coefficients) {
    const Call called = call("solve", products);
    const auto sums = const_grid_of(called, {"products", products});
    const auto ranges = row_table_of<PieceRange>(called, table);
    Kernels::solve(called, sums, ranges, grid_of(called, {"coefficients", coefficients, ranges.num_rows}));
  }

  static void combine(const Tensor& coefficients, const Tensor& table, const Tensor& factors) {
    const Call called = call("combine", coefficients);
    const auto numbers = const_grid_of(called, {"coefficients", coefficients});
    const auto pieces = row_table_of<Piece>(called, table);
    Kernels::combine(called, numbers, pieces, span_of<float>(called, {"factors", factors}));
  }

  static void product(const Tensor& left, const Tensor& right, const Tensor& table, const Tensor& values,
                      const Tensor& left_out) {
    const Call called = call("product", left);
    const auto lefts = span_of<const float>(called, {"left", left});
    const auto rights = span_of<const float>(called, {"right", right});
    const auto rows = row_table_of<ProductRows>(called, table);
    const auto results = span_of<float>(called, {"values", values});
    Kernels::product(called, lefts, rights, rows, results,
                     span_of<float>(called, {"left_out", left_out, results.size}));
  }

  template <typename Library>
  static void register_in(Library& library) {
    library.impl("low_rank_gram", TORCH_BOX(&LowRankOps::gram));
    library.impl("low_rank_solve", TORCH_BOX(&LowRankOps::solve));
    library.impl("low_rank_combine", TORCH_BOX(&LowRankOps::combine));
    library.impl("low_rank_product", TORCH_BOX(&LowRankOps::product));
  }
};

}  // namespace torchbagua::binding
