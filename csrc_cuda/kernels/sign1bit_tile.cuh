// Sign1Bit on a tile: the layout of elements and signs in the lanes of a warp; element/sign1bit.h has the arithmetic.
#pragma once

#include "../element/sign1bit.h"
#include "blocks.cuh"

namespace torchbagua::cuda {
namespace sign1bit {

static_assert(kSignLanes == kWarpThreads, "a warp sums as many lanes");

constexpr int kWordBits = 32;
constexpr int kWordBytes = 4;

__device__ __forceinline__ int lane_of_thread() { return rank_in_team<kWarpThreads>(); }

__device__ __forceinline__ long long payload_bytes(long long length) { return length / 8 + (length % 8 != 0); }

// Up to kLength elements of a block. A lane stores element lane + 32 i at index i in its registers, and the signs of
// its elements in words: the sign of element i is bit i % 32 of word i / 32.
template <int kLaneElements>
struct LaneTile {
  static constexpr int kElements = kLaneElements;
  static constexpr int kWords = kElements / kWordBits;
  static constexpr int kLength = kWarpThreads * kElements;
  using Values = float[kElements];
  using Signs = unsigned int[kWords];

  long long first;  // index in the block
  int length;
  bool is_whole;

  __device__ __forceinline__ LaneTile(long long first, long long block_length)
      : first(first),
        length(static_cast<int>(block_length - first < kLength ? block_length - first : kLength)),
        is_whole(block_length - first >= kLength) {}

  // The first element of this lane in a tensor.
  template <typename Element>
  __device__ __forceinline__ Element* own(Element* x, const Block& block) const {
    return x + block.start + first + lane_of_thread();
  }

  // Calls `body(i, step, is_there)` for each element of this lane: at index i in its registers and `step` elements
  // after the lane's first element. `is_there` is false past the end of the tile.
  template <typename Body>
  __device__ __forceinline__ void for_each_element(const Body& body) const {
    const int rest = length - lane_of_thread();  // so that bounds and addresses do not take a register per element
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      body(i, i * kWarpThreads, i * kWarpThreads < rest);
    }
  }
};

// Transposes 32 words, one per lane: bit i of lane j becomes bit j of lane i.
__device__ __forceinline__ unsigned int transpose(unsigned int word) {
  unsigned int low = 0x0000ffffu;
#pragma unroll
  for (int width = kWordBits / 2; width > 0; width /= 2) {
    const unsigned int other = __shfl_xor_sync(kAllLanes, word, width);
    word = (lane_of_thread() & width) == 0 ? (word & low) | (other & low) << width
                                           : (word & ~low) | (other >> width & low);
    low ^= low << width / 2;
  }
  return word;
}

// The signs of 32 consecutive elements, of which `num_bytes` bytes exist. A payload can have any alignment.
__device__ __forceinline__ unsigned int read_signs(const unsigned char* from, int num_bytes) {
  if (num_bytes >= kWordBytes && is_aligned<kWordBytes>(from)) {
    return *reinterpret_cast<const unsigned int*>(from);
  }
  unsigned int signs = 0;
#pragma unroll
  for (int i = 0; i < kWordBytes; ++i) {
    signs |= i < num_bytes ? static_cast<unsigned int>(from[i]) << (8 * i) : 0u;
  }
  return signs;
}

__device__ __forceinline__ void write_signs(unsigned int signs, int num_bytes, unsigned char* to) {
  if (num_bytes >= kWordBytes && is_aligned<kWordBytes>(to)) {
    *reinterpret_cast<unsigned int*>(to) = signs;
    return;
  }
#pragma unroll
  for (int i = 0; i < kWordBytes; ++i) {
    if (i < num_bytes) {
      to[i] = static_cast<unsigned char>(signs >> (8 * i));
    }
  }
}

// The position of this lane's bytes in the payload of a tile: before the transposition, lane j has the bytes of word j.
struct LaneBytes {
  long long offset;
  int count;  // may be negative

  template <typename Tile>
  __device__ __forceinline__ LaneBytes(const Tile& tile, int word) {
    const int within = (word * kWarpThreads + lane_of_thread()) * kWordBytes;
    offset = tile.first / 8 + within;
    count = static_cast<int>(payload_bytes(tile.length)) - within;
  }
};

template <typename Tile>
__device__ __forceinline__ void store_signs(const Tile& tile, const typename Tile::Signs& signs,
                                            unsigned char* payload) {
#pragma unroll
  for (int word = 0; word < Tile::kWords; ++word) {
    const LaneBytes bytes(tile, word);
    write_signs(transpose(signs[word]), bytes.count, payload + bytes.offset);
  }
}

// `scale`, negated if the highest bit of `bits` is set.
__device__ __forceinline__ float with_sign(float scale, unsigned int bits) {
  return float_of(bits_of(scale) ^ (bits & 0x80000000u));
}

// NaN unless an encoder can have written the scale.
__device__ __forceinline__ float read_scale(const unsigned char* header) {
  return make_signed_scale<float>(float_of(read_word(header))).positive;
}

}  // namespace sign1bit
}  // namespace torchbagua::cuda
