// Code shared by the CUDA kernels of block-wise codecs: which threads process a block, and how they store parts of it.
//
// A team, which is all threads of a thread block or a few of them, processes one block of the table after the other. It
// stores a tile of the block in registers: a block no longer than a tile is read from memory once. This file needs no
// headers except those of csrc_cuda/element: nvcc and NVRTC compile it unchanged, with --fmad=false.
#pragma once

#include "../element/blocks.h"
#include "vector.cuh"

// The last line of a codec's file; cuda/codec.h redefines it.
#ifndef TORCHBAGUA_CUDA_CODEC
#define TORCHBAGUA_CUDA_CODEC(codec, num_teams)
#define TORCHBAGUA_CUDA_CODEC_OF_FIELDS(codec, num_teams, num_fields)
#endif

namespace torchbagua::cuda {

constexpr int kThreads = 64;
constexpr int kWarpThreads = 32;
constexpr int kWarps = kThreads / kWarpThreads;
constexpr unsigned int kAllLanes = 0xffffffffu;

// The content of a table is known only on the device: a row outside x or the wire aborts the kernel, as an index out of
// bounds aborts torch's kernels.
__device__ __forceinline__ void require_inside(const Block& block, int header_bytes, long long payload_bytes,
                                               long long num_elements, long long wire_bytes) {
  if (!is_inside(block, header_bytes, payload_bytes, num_elements, wire_bytes)) {
    __trap();
  }
}

// The index of a thread in its team, and of the team in its thread block, which is 0 for a team of all threads.
template <int kTeam>
__device__ __forceinline__ int rank_in_team() {
  return static_cast<int>(kTeam == kThreads ? threadIdx.x : threadIdx.x % kTeam);
}

template <int kTeam>
__device__ __forceinline__ int team_of_thread() {
  return static_cast<int>(kTeam == kThreads ? 0 : threadIdx.x / kTeam);
}

// Calls `body` for every block of this thread's team.
template <int kTeam, typename Body>
__device__ __forceinline__ void for_each_block(const Table& table, const Body& body) {
  constexpr int kTeams = kThreads / kTeam;
  const long long num_teams = static_cast<long long>(gridDim.x) * kTeams;
  for (long long b = static_cast<long long>(blockIdx.x) * kTeams + team_of_thread<kTeam>(); b < table.num_blocks;
       b += num_teams) {
    body(table.blocks[b]);
  }
}

// Byte by byte, since a wire can have any alignment.
__device__ __forceinline__ unsigned int read_word(const unsigned char* at) {
  return at[0] | at[1] << 8 | at[2] << 16 | static_cast<unsigned int>(at[3]) << 24;
}

// Up to kLength elements of a block, as vectors of kVectorWidth, in the registers of a team of kTeamThreads: thread t
// has the vectors t, t + kTeam, and so on.
template <int kTeamThreads, int kVectorWidth>
struct Tile {
  static constexpr int kTeam = kTeamThreads;
  static constexpr int kWidth = kVectorWidth;

  // Elements can have any alignment and are loaded one by one; the last vector may be incomplete.
  static constexpr bool kIsNarrow = kWidth < 4;

  // The elements of one thread. Few if they are loaded one by one: registers for the address and the bounds of each
  // would leave room for fewer thread blocks, and elements that are read again are in the L1 cache. Fewer for a team of
  // a few threads, since its blocks are short.
  static constexpr int kElements = kIsNarrow ? 4 : (kTeam == kThreads ? 32 : 16);
  static constexpr int kLength = kTeam * kElements;

  long long first;  // index in the block
  int num_vectors;
  int length;

  // Calls `body(i, v)` for every vector v of this thread; its elements begin at index i in the thread's registers.
  template <typename Body>
  __device__ __forceinline__ void for_each_vector(const Body& body) const {
#pragma unroll  // indices known at compile time keep arrays in registers
    for (int j = 0; j < kElements / kWidth; ++j) {
      const int v = j * kTeam + rank_in_team<kTeam>();
      if (v < num_vectors) {
        body(j * kWidth, v);
      }
    }
  }

  // Calls `body(i, e)` for every element e of this thread, which is at index i in its registers.
  template <typename Body>
  __device__ __forceinline__ void for_each_element(const Body& body) const {
    for_each_vector([&](int i, int v) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (!kIsNarrow || kWidth == 1 || v * kWidth + k < length) {
          body(i + k, v * kWidth + k);
        }
      }
    });
  }
};

// The tile that begins at element `first` of a block. Its length must be a multiple of kWidth unless kIsNarrow.
template <typename Tile>
__device__ __forceinline__ Tile tile_at(long long first, long long length) {
  const long long rest = length - first;
  const int own = static_cast<int>(rest < Tile::kLength ? rest : Tile::kLength);
  return Tile{first, (Tile::kIsNarrow ? own + Tile::kWidth - 1 : own) / Tile::kWidth, own};
}

// A thread's elements of a tile.
template <typename Tile>
using Values = float[Tile::kElements];

// Calls `use(i, value)` for a thread's elements of a tile.
template <typename Tile, typename Element, typename Use>
__device__ __forceinline__ void for_each_loaded(const Tile& tile, const Element* block, const Use& use) {
  if constexpr (Tile::kIsNarrow) {
    tile.for_each_element([&](int i, int e) { use(i, to_float(block[tile.first + e])); });
  } else {
    const auto* vectors = reinterpret_cast<const Vector<Element, Tile::kWidth>*>(block + tile.first);
    tile.for_each_vector([&](int i, int v) {
      const Vector<Element, Tile::kWidth> vector = vectors[v];
#pragma unroll
      for (int k = 0; k < Tile::kWidth; ++k) {
        use(i + k, to_float(vector.elements[k]));
      }
    });
  }
}

template <typename Tile, typename Element>
__device__ __forceinline__ void store_values(const Tile& tile, const Values<Tile>& values, Element* block) {
  if constexpr (Tile::kIsNarrow) {
    tile.for_each_element([&](int i, int e) { from_float(values[i], block[tile.first + e]); });
  } else {
    auto* vectors = reinterpret_cast<Vector<Element, Tile::kWidth>*>(block + tile.first);
    tile.for_each_vector([&](int i, int v) {
      Vector<Element, Tile::kWidth> vector;
#pragma unroll
      for (int k = 0; k < Tile::kWidth; ++k) {
        from_float(values[i + k], vector.elements[k]);
      }
      vectors[v] = vector;
    });
  }
}

template <int kSize, typename Value>
__device__ __forceinline__ void fill(Value (&array)[kSize], Value value) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    array[i] = value;
  }
}

template <int kSize>
__device__ __forceinline__ void divide(float (&values)[kSize], float divisor) {
  if (has_exact_reciprocal(divisor)) {
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
