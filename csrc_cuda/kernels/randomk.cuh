// RandomK on CUDA.
#pragma once

#include "../element/randomk.h"
#include "sparse.cuh"

namespace torchbagua::cuda {
namespace sparse {

struct DrawnElements {
  using Format = RandomKFormat;

  static __device__ __forceinline__ void draw(Shared& shared, const DrawnBlock& block) {
    for_each(num_draws(block), [&](int draw) {
      draw_elements(block, draw, [&](int i, int index) { shared.indices[i] = static_cast<unsigned short>(index); });
    });
    __syncthreads();
  }

  static __device__ __forceinline__ int select(Shared& shared, const DrawnBlock& block) {
    const int largest = largest_of(shared, block.length, 0, [](int i) { return i; });
    if (largest >= kUnusableMagnitude) {  // of an element that may not be drawn
      return largest;
    }
    draw(shared, block);
    return largest_of(shared, block.kept, 1, [&](int i) { return shared.indices[i]; });
  }

  static __device__ __forceinline__ unsigned char index_byte_at(const Shared&, const DrawnBlock&, int) { return 0; }

  static __device__ __forceinline__ void read_indices(Shared& shared, const DrawnBlock& block, const unsigned char*) {
    draw(shared, block);
  }
};

}  // namespace sparse

TORCHBAGUA_SPARSE_KERNELS(randomk, sparse::DrawnElements)

}  // namespace torchbagua::cuda
