// BlockK on CUDA.
#pragma once

#include "../element/blockk.h"
#include "sparse.cuh"

namespace torchbagua::cuda {
namespace sparse {

struct LargestRun {
  using Format = BlockKFormat;

  static __device__ __forceinline__ void set_indices(Shared& shared, const SparseBlock& block, int run) {
    const int start = run_start(block, run);
    for_each(block.kept, [&](int i) { shared.indices[i] = static_cast<unsigned short>(start + i); });
    __syncthreads();
  }

  static __device__ __forceinline__ int select(Shared& shared, const SparseBlock& block) {
    const int largest = largest_of(shared, block.length, 0, [](int i) { return i; });
    if (largest >= kUnusableMagnitude) {
      return largest;
    }
    double most = -1.0;
    int chosen = 0;
    for_each(num_runs(block), [&](int run) {
      const double sum = sum_of_squares(shared.values + run_start(block, run), block.kept);
      if (sum > most) {
        most = sum;
        chosen = run;
      }
    });
    shared.sums[threadIdx.x] = most;
    shared.runs[threadIdx.x] = chosen;
    __syncthreads();
    for (int thread = 0; thread < kThreads; ++thread) {
      const double sum = shared.sums[thread];
      const int run = shared.runs[thread];
      if (sum > most || (sum == most && run < chosen)) {
        most = sum;
        chosen = run;
      }
    }
    set_indices(shared, block, chosen);
    return largest_of(shared, block.kept, 1, [&](int i) { return shared.indices[i]; });
  }

  // Rounded up, since the start of the last run need not be a multiple of its length.
  static __device__ __forceinline__ unsigned char index_byte_at(const Shared& shared, const SparseBlock& block,
                                                                int byte) {
    const int kept = static_cast<int>(block.kept);
    return static_cast<unsigned char>((shared.indices[0] + kept - 1) / kept >> (8 * byte));
  }

  static __device__ __forceinline__ void read_indices(Shared& shared, const SparseBlock& block,
                                                      const unsigned char* payload) {
    const int run = read_run(payload);
    if (threadIdx.x == 0 && run >= num_runs(block)) {
      shared.is_spoiled = true;
    }
    set_indices(shared, block, run);
  }
};

}  // namespace sparse

TORCHBAGUA_SPARSE_KERNELS(blockk, sparse::LargestRun)

}  // namespace torchbagua::cuda
