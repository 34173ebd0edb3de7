// Low-rank gradients on CUDA: each operation launches one kernel over the rows of its table and does not wait.
#pragma once

#include "kernels/low_rank.cuh"
#include "launch.h"
#include "low_rank_ops.h"

namespace torchbagua::cuda {

struct LowRankOnCuda {
  using Call = binding::Call;

  static constexpr auto kDevice = binding::DeviceType::CUDA;

  static void gram(const Call& call, Span<const float> factors, RowTable<Piece> table, Grid<double> products) {
    launch(call, table.num_rows, kThreads, &torchbagua_low_rank_gram, factors, table, products);
  }

  static void solve(const Call& call, Grid<const double> products, RowTable<PieceRange> table,
                    Grid<double> coefficients) {
    launch(call, table.num_rows, kThreads, &torchbagua_low_rank_solve, products, table, coefficients);
  }

  static void combine(const Call& call, Grid<const double> coefficients, RowTable<Piece> table, Span<float> factors) {
    launch(call, table.num_rows, kThreads, &torchbagua_low_rank_combine, coefficients, table, factors);
  }

  static void product(const Call& call, Span<const float> left, Span<const float> right, RowTable<ProductRows> table,
                      Span<float> values, Span<float> left_out) {
    launch(call, table.num_rows, kThreads, &torchbagua_low_rank_product, left, right, table, values, left_out);
  }
};

inline void add_low_rank_kernels() {
  add_kernels(&torchbagua_low_rank_gram, &torchbagua_low_rank_solve, &torchbagua_low_rank_combine,
              &torchbagua_low_rank_product);
}

}  // namespace torchbagua::cuda

STABLE_TORCH_LIBRARY_IMPL(torchbagua, CUDA, library) {
  torchbagua::binding::LowRankOps<torchbagua::cuda::LowRankOnCuda>::register_in(library);
  torchbagua::cuda::add_low_rank_kernels();
}
