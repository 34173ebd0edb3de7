// What the CUDA kernels of block-wise codecs share: who works on which block, and how threads hold a part of one.
//
// A thread block takes one block of the table after the other. It holds a tile of it in registers: a block that is no
// longer than a tile is read from memory once. Nothing here needs a header but those of csrc_cuda/element: nvcc
// and NVRTC compile it as it is, with --fmad=false.
#pragma once

#include "../element/blocks.h"
#include "vector.cuh"

// The last line of a codec's file, of which cuda/codec.h makes more.
#ifndef TORCHBAGUA_CUDA_CODEC
#define TORCHBAGUA_CUDA_CODEC(codec)
#endif

namespace torchbagua::cuda {

constexpr int kThreads = 64;
constexpr int kWarpThreads = 32;
constexpr int kWarps = kThreads / kWarpThreads;

// Elements of a tile that one thread holds, where it loads kWidth of them at a time. Few where that is one: a register
// for the address and the bounds of each would leave room for fewer thread blocks, and what is read again is in the L1
// cache.
template <int kWidth>
constexpr int kThreadElements = kWidth == 1 ? 4 : 32;
template <int kWidth>
constexpr int kTile = kThreads * kThreadElements<kWidth>;

// The content of a table is known on the device only: a row that leads out of x or of the wire ends the kernel, as an
// index out of bounds ends torch's own.
__device__ __forceinline__ void require_inside(const Block& block, int header_bytes, long long payload_bytes,
                                               long long num_elements, long long wire_bytes) {
  if (!is_inside(block, header_bytes, payload_bytes, num_elements, wire_bytes)) {
    __trap();
  }
}

// Up to kTile<kWidth> elements of a block, as vectors of kWidth: thread t has the vectors t, t + kThreads, and so on.
template <int kWidth>
struct Tile {
  long long first;  // element of the block
  int num_vectors;

  // Calls `body(i, v)` for every vector v of this thread, of which the elements stand at i in the thread's registers.
  template <typename Body>
  __device__ __forceinline__ void for_each_vector(const Body& body) const {
#pragma unroll  // indices known to the compiler keep arrays in registers
    for (int j = 0; j < kThreadElements<kWidth> / kWidth; ++j) {
      const int v = j * kThreads + static_cast<int>(threadIdx.x);
      if (v < num_vectors) {
        body(j * kWidth, v);
      }
    }
  }
};

// The tile that begins at element `first` of a block. Its length must be a multiple of kWidth.
template <int kWidth>
__device__ __forceinline__ Tile<kWidth> tile_at(long long first, long long length) {
  const long long rest = length - first;
  return Tile<kWidth>{first, static_cast<int>(rest < kTile<kWidth> ? rest : kTile<kWidth>) / kWidth};
}

// A thread's elements of a tile.
template <int kWidth>
using Values = float[kThreadElements<kWidth>];

// Calls `use(i, value)` for a thread's elements of a tile.
template <int kWidth, typename Element, typename Use>
__device__ __forceinline__ void for_each_loaded(const Tile<kWidth>& tile, const Element* block, const Use& use) {
  const auto* vectors = reinterpret_cast<const Vector<Element, kWidth>*>(block + tile.first);
  tile.for_each_vector([&](int i, int v) {
    const Vector<Element, kWidth> vector = vectors[v];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      use(i + k, to_float(vector.elements[k]));
    }
  });
}

template <int kWidth, typename Element>
__device__ __forceinline__ void store_values(const Tile<kWidth>& tile, const Values<kWidth>& values, Element* block) {
  auto* vectors = reinterpret_cast<Vector<Element, kWidth>*>(block + tile.first);
  tile.for_each_vector([&](int i, int v) {
    Vector<Element, kWidth> vector;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      from_float(values[i + k], vector.elements[k]);
    }
    vectors[v] = vector;
  });
}

template <int kSize, typename Value>
__device__ __forceinline__ void fill(Value (&array)[kSize], Value value) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    array[i] = value;
  }
}

// The quotient by a power of two is the product with its reciprocal, to the bit: both round the same number.
template <int kSize>
__device__ __forceinline__ void divide(float (&values)[kSize], float divisor) {
  const unsigned int exponent = bits_of(divisor) >> 23;
  if ((bits_of(divisor) & 0x007fffffu) == 0 && 0 < exponent && exponent < 254) {
    const float reciprocal = 1.0f / divisor;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      values[i] *= reciprocal;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      values[i] /= divisor;
    }
  }
}

}  // namespace torchbagua::cuda
