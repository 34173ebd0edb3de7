// MinMaxUInt8 of a tile: its range, its header and its codes; element/minmax_uint8.h has the arithmetic.
#pragma once

#include "../element/minmax_uint8.h"
#include "blocks.cuh"

namespace torchbagua::cuda {

// What make_header needs of a set of elements; empty to begin with.
struct Extremes {
  float min = float_of(0x7f800000u);
  float max = float_of(0xff800000u);
  int magnitude = 0;
};

__device__ __forceinline__ void join(Extremes& extremes, float min, float max, int magnitude) {
  extremes.min = min_number(extremes.min, min);
  extremes.max = max_number(extremes.max, max);
  extremes.magnitude = magnitude > extremes.magnitude ? magnitude : extremes.magnitude;
}

template <int kWidth>
__device__ __forceinline__ void join_tile(Extremes& extremes, const Tile<kWidth>& tile, const Values<kWidth>& values) {
  tile.for_each_vector([&](int i, int) {
#pragma unroll
    for (int k = i; k < i + kWidth; ++k) {
      join(extremes, values[k], values[k], magnitude_of(values[k]));
    }
  });
}

// The header of a block from the extremes that each thread has found, on all threads.
__device__ __forceinline__ Header make_header(Extremes extremes) {
  constexpr unsigned int kAllLanes = 0xffffffffu;
#pragma unroll
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    const float min = __shfl_xor_sync(kAllLanes, extremes.min, distance);
    const float max = __shfl_xor_sync(kAllLanes, extremes.max, distance);
    join(extremes, min, max, __shfl_xor_sync(kAllLanes, extremes.magnitude, distance));
  }
  __shared__ float min[kWarps];
  __shared__ float max[kWarps];
  __shared__ int magnitude[kWarps];
  __syncthreads();  // all have read what stands there of the block before
  if (threadIdx.x % kWarpThreads == 0) {
    const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
    min[warp] = extremes.min;
    max[warp] = extremes.max;
    magnitude[warp] = extremes.magnitude;
  }
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    join(extremes, min[warp], max[warp], magnitude[warp]);
  }
  return torchbagua::make_header(extremes.min, extremes.max, extremes.magnitude);
}

// Byte by byte: a wire may begin anywhere.
__device__ __forceinline__ float read_float(const unsigned char* at) {
  return float_of(at[0] | at[1] << 8 | at[2] << 16 | static_cast<unsigned int>(at[3]) << 24);
}

__device__ __forceinline__ Header read_header(const unsigned char* at) {
  return Header{read_float(at), read_float(at + 4)};
}

// By the first of the threads, a byte each.
__device__ __forceinline__ void write_header(const Header& header, unsigned char* at) {
  if (threadIdx.x < sizeof(Header)) {
    const unsigned int bits = bits_of(threadIdx.x < 4 ? header.min : header.max);
    at[threadIdx.x] = static_cast<unsigned char>(bits >> (8 * (threadIdx.x % 4)));
  }
}

// A thread's codes of a tile: that of element i is byte i % 4 of word i / 4.
template <int kWidth>
using Codes = unsigned int[kThreadElements<kWidth> / 4];

template <int kWidth>
__device__ __forceinline__ void load_codes(const Tile<kWidth>& tile, const unsigned char* payload,
                                           Codes<kWidth>& codes) {
  fill(codes, 0u);  // else what a short tile leaves out would hold its registers from the kernel's begin on
  if constexpr (kWidth == 1) {
    tile.for_each_vector(
        [&](int i, int v) { codes[i / 4] |= static_cast<unsigned int>(payload[tile.first + v]) << (8 * (i % 4)); });
  } else {
    using Words = Vector<unsigned int, kWidth / 4>;
    const auto* vectors = reinterpret_cast<const Words*>(payload + tile.first);
    tile.for_each_vector([&](int i, int v) {
      const Words words = vectors[v];
#pragma unroll
      for (int k = 0; k < kWidth / 4; ++k) {
        codes[i / 4 + k] = words.elements[k];
      }
    });
  }
}

template <int kWidth>
__device__ __forceinline__ void store_codes(const Tile<kWidth>& tile, const Codes<kWidth>& codes,
                                            unsigned char* payload) {
  if constexpr (kWidth == 1) {
    tile.for_each_vector(
        [&](int i, int v) { payload[tile.first + v] = static_cast<unsigned char>(codes[i / 4] >> (8 * (i % 4))); });
  } else {
    using Words = Vector<unsigned int, kWidth / 4>;
    auto* vectors = reinterpret_cast<Words*>(payload + tile.first);
    tile.for_each_vector([&](int i, int v) {
      Words words;
#pragma unroll
      for (int k = 0; k < kWidth / 4; ++k) {
        words.elements[k] = codes[i / 4 + k];
      }
      vectors[v] = words;
    });
  }
}

// The header must be usable.
template <int kWidth>
__device__ __forceinline__ void quantize_tile(const Tile<kWidth>& tile, const Values<kWidth>& values,
                                              const Coder& coder, Codes<kWidth>& codes) {
  fill(codes, 0u);
  tile.for_each_vector([&](int i, int) {
#pragma unroll
    for (int k = i; k < i + kWidth; ++k) {
      codes[k / 4] |= static_cast<unsigned int>(quantize(values[k], coder)) << (8 * (k % 4));
    }
  });
}

// 2^23 plus a byte of a word: a float from there to 2^24 has its integer in its low bits.
__device__ __forceinline__ float shifted_code(unsigned int word, int byte) {
#if defined(__CUDA_ARCH__)
  return float_of(__byte_perm(word, 0x4b000000u, 0x7440u + byte));
#else
  return float_of(0x4b000000u | (word >> (8 * byte) & 0xffu));
#endif
}

// Calls `use(i, value)` with the values of a tile's codes; NaN of some bits where the header is not usable.
template <int kWidth, typename Use>
__device__ __forceinline__ void for_each_decoded(const Tile<kWidth>& tile, const Codes<kWidth>& codes,
                                                 const Coder& coder, const Use& use) {
  const float shift = 8388608.0f - coder.lowest;
  tile.for_each_vector([&](int i, int) {
#pragma unroll
    for (int k = i; k < i + kWidth; ++k) {
      use(k, dequantize_steps(shifted_code(codes[k / 4], k % 4) - shift, coder));
    }
  });
}

}  // namespace torchbagua::cuda
