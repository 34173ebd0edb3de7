// TopK on CUDA.
//
// The threshold for the magnitudes to send is determined bit by bit, from the highest: a bit is set if enough
// magnitudes are no smaller than the result.
#pragma once

#include "../element/topk.h"
#include "sparse.cuh"

namespace torchbagua::cuda {
namespace sparse {

__device__ __forceinline__ int num_not_below(Shared& shared, long long length, int magnitude, int turn) {
  int count = 0;
  for_each(length, [&](int i) { count += magnitude_of(shared.values[i]) >= magnitude; });
  return joined_over_threads(shared, count, turn, [](int a, int b) { return a + b; });
}

// The threshold for the magnitudes of shared.values: all larger ones are sent, and no smaller ones.
__device__ __forceinline__ int smallest_kept(Shared& shared, const SparseBlock& block) {
  int smallest = 0;
  for (int bit = 30; bit >= 0; --bit) {
    const int candidate = smallest | 1 << bit;
    const int count = num_not_below(shared, block.length, candidate, bit);
    if (count >= block.kept) {
      smallest = candidate;
    }
    if (count == block.kept) {
      break;
    }
  }
  return smallest;
}

__device__ __forceinline__ int num_before(const unsigned int* words, int word) {
  int count = 0;
  for (int i = 0; i < word; ++i) {
    count += __popc(words[i]);
  }
  return count;
}

// Writes shared.indices.
__device__ __forceinline__ void find_largest(Shared& shared, const SparseBlock& block) {
  const int smallest = smallest_kept(shared, block);
  const int num_words = static_cast<int>((block.length + kWordBits - 1) / kWordBits);
  const long long whole_rounds = (block.length + kThreads - 1) / kThreads * kThreads;
  for_each(whole_rounds, [&](int i) {
    const int magnitude = i < block.length ? magnitude_of(shared.values[i]) : -1;
    const unsigned int larger = __ballot_sync(kAllLanes, magnitude > smallest);
    const unsigned int equal = __ballot_sync(kAllLanes, magnitude == smallest);
    if (i % kWordBits == 0 && i < block.length) {
      shared.larger[i / kWordBits] = larger;
      shared.equal[i / kWordBits] = equal;
    }
  });
  __syncthreads();
  const int num_larger = num_before(shared.larger, num_words);
  for_each(num_words, [&](int word) {
    int room = static_cast<int>(block.kept) - num_larger - num_before(shared.equal, word);
    unsigned int kept = shared.larger[word];
    for (unsigned int rest = shared.equal[word]; rest != 0 && room > 0; rest &= rest - 1, --room) {
      kept |= rest & (0u - rest);  // the lowest set bit
    }
    shared.kept[word] = kept;
  });
  __syncthreads();
  for_each(num_words, [&](int word) {
    int place = num_before(shared.kept, word);
    for (unsigned int rest = shared.kept[word]; rest != 0; rest &= rest - 1) {
      const unsigned int below = (rest & (0u - rest)) - 1;
      shared.indices[place++] = static_cast<unsigned short>(word * kWordBits + __popc(below));
    }
  });
  __syncthreads();
}

struct LargestElements {
  using Format = TopKFormat;

  static __device__ __forceinline__ int select(Shared& shared, const SparseBlock& block) {
    find_largest(shared, block);
    return largest_of(shared, block.kept, 0, [&](int i) { return shared.indices[i]; });
  }

  static __device__ __forceinline__ unsigned char index_byte_at(const Shared& shared, const SparseBlock& block,
                                                                int byte) {
    return index_byte(byte, block.kept, index_bits(block.length), [&](long long i) { return shared.indices[i]; });
  }

  static __device__ __forceinline__ void read_indices(Shared& shared, const SparseBlock& block,
                                                      const unsigned char* payload) {
    const int bits = index_bits(block.length);
    for_each(block.kept, [&](int i) { shared.indices[i] = static_cast<unsigned short>(read_index(payload, i, bits)); });
    __syncthreads();
    for_each(block.kept, [&](int i) {
      if (shared.indices[i] >= block.length || (i > 0 && shared.indices[i] <= shared.indices[i - 1])) {
        shared.is_spoiled = true;
      }
    });
    __syncthreads();
  }
};

}  // namespace sparse

TORCHBAGUA_SPARSE_KERNELS(topk, sparse::LargestElements)

}  // namespace torchbagua::cuda
