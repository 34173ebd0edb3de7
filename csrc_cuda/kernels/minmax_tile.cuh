// The min-max codecs on a tile: range, header and codes; element/minmax.h has the arithmetic.
#pragma once

#include "../element/minmax.h"
#include "blocks.cuh"

namespace torchbagua::cuda {

// The inputs of make_range for a set of elements, which is initially empty.
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

template <typename Tile>
__device__ __forceinline__ void join_tile(Extremes& extremes, const Tile& tile, const Values<Tile>& values) {
  tile.for_each_element([&](int i, int) { join(extremes, values[i], values[i], magnitude_of(values[i])); });
}

// The lanes of this thread's warp that belong to its team: other lanes may be at another point in the code.
template <int kTeam>
__device__ __forceinline__ unsigned int team_lanes() {
  constexpr int kLanes = kTeam < kWarpThreads ? kTeam : kWarpThreads;
  const unsigned int all = 0xffffffffu >> (kWarpThreads - kLanes);
  return all << (threadIdx.x % kWarpThreads / kLanes * kLanes);
}

// Joins the extremes of all threads of a team; every thread gets the result.
template <int kTeam>
__device__ __forceinline__ void join_team(Extremes& extremes) {
  constexpr int kLanes = kTeam < kWarpThreads ? kTeam : kWarpThreads;
  const unsigned int lanes = team_lanes<kTeam>();
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    const float min = __shfl_xor_sync(lanes, extremes.min, distance);
    const float max = __shfl_xor_sync(lanes, extremes.max, distance);
    join(extremes, min, max, __shfl_xor_sync(lanes, extremes.magnitude, distance));
  }
  if constexpr (kTeam > kWarpThreads) {
    static_assert(kTeam == kThreads, "a team is a part of a warp, or all threads");
    __shared__ float min[kWarps];
    __shared__ float max[kWarps];
    __shared__ int magnitude[kWarps];
    __syncthreads();  // all threads have read the extremes of the previous block
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
  }
}

template <typename Format>
__device__ __forceinline__ Range read_range(const unsigned char* at) {
  typename Format::Header header;
#pragma unroll
  for (unsigned int& word : header.words) {
    word = read_word(at);
    at += 4;
  }
  return Format::unpack(header);
}

// The first threads of a team write one byte each.
template <typename Format, int kTeam>
__device__ __forceinline__ void write_range(const Range& range, unsigned char* at) {
  const typename Format::Header header = Format::pack(range);
  static_assert(sizeof(header) <= kTeam, "a thread for each byte");
  const unsigned int byte = rank_in_team<kTeam>();
  if (byte < sizeof(header)) {
    const unsigned int word = sizeof(header) == 4 || byte < 4 ? header.words[0] : header.words[sizeof(header) / 4 - 1];
    at[byte] = static_cast<unsigned char>(word >> (8 * (byte % 4)));
  }
}

// A thread's codes of a tile: the code of element i begins at bit i * kCodeBits.
template <typename Format, typename Tile>
using Codes = unsigned int[(Tile::kElements * Format::kCodeBits + 31) / 32];

// The position of the code of element i among the codes of a thread.
template <typename Format>
struct CodePlace {
  int word;
  int bit;

  __device__ __forceinline__ explicit CodePlace(int i)
      : word(i * Format::kCodeBits / 32), bit(i * Format::kCodeBits % 32) {}
};

// The bytes of a vector of codes: whole words, half a word, or one byte if vectors are narrow.
template <typename Format, typename Tile>
struct CodeBytes {
  static constexpr int kBytes = Tile::kWidth * Format::kCodeBits / 8;
  static_assert(Tile::kIsNarrow ? kBytes == 1 : kBytes == 2 || kBytes % 4 == 0, "what a payload is read by");
};

// Whether the alignment of an address allows loading vectors of codes.
template <typename Format, int kWidth>
__device__ __forceinline__ bool codes_fit(const unsigned char* payload) {
  return is_aligned<kWidth * Format::kCodeBits / 8>(payload);
}

template <typename Format, typename Tile>
__device__ __forceinline__ void load_codes(const Tile& tile, const unsigned char* payload, Codes<Format, Tile>& codes) {
  constexpr int kBytes = CodeBytes<Format, Tile>::kBytes;
  const unsigned char* at = payload + tile.first * Format::kCodeBits / 8;
  fill(codes, 0u);  // else registers for the missing part of a short tile would be live from the start of the kernel
  tile.for_each_vector([&](int i, int v) {
    const CodePlace<Format> place(i);
    if constexpr (kBytes == 1) {
      codes[place.word] |= static_cast<unsigned int>(at[v]) << place.bit;
    } else if constexpr (kBytes == 2) {
      codes[place.word] |= static_cast<unsigned int>(reinterpret_cast<const unsigned short*>(at)[v]) << place.bit;
    } else {
      using Words = Vector<unsigned int, kBytes / 4>;
      const Words words = reinterpret_cast<const Words*>(at)[v];
#pragma unroll
      for (int k = 0; k < kBytes / 4; ++k) {
        codes[place.word + k] = words.elements[k];
      }
    }
  });
}

template <typename Format, typename Tile>
__device__ __forceinline__ void store_codes(const Tile& tile, const Codes<Format, Tile>& codes,
                                            unsigned char* payload) {
  constexpr int kBytes = CodeBytes<Format, Tile>::kBytes;
  unsigned char* at = payload + tile.first * Format::kCodeBits / 8;
  tile.for_each_vector([&](int i, int v) {
    const CodePlace<Format> place(i);
    if constexpr (kBytes == 1) {
      at[v] = static_cast<unsigned char>(codes[place.word] >> place.bit);
    } else if constexpr (kBytes == 2) {
      reinterpret_cast<unsigned short*>(at)[v] = static_cast<unsigned short>(codes[place.word] >> place.bit);
    } else {
      using Words = Vector<unsigned int, kBytes / 4>;
      Words words;
#pragma unroll
      for (int k = 0; k < kBytes / 4; ++k) {
        words.elements[k] = codes[place.word + k];
      }
      reinterpret_cast<Words*>(at)[v] = words;
    }
  });
}

// The range must be usable. The bits of missing elements stay 0.
template <typename Format, typename Tile>
__device__ __forceinline__ void quantize_tile(const Tile& tile, const Values<Tile>& values, const Coder& coder,
                                              Codes<Format, Tile>& codes) {
  fill(codes, 0u);
  tile.for_each_element([&](int i, int) {
    const CodePlace<Format> place(i);
    codes[place.word] |= quantize<Format>(values[i], coder) << place.bit;
  });
}

// 2^23 plus a code: a float from 2^23 to 2^24 has its integer value in its low bits.
template <typename Format>
__device__ __forceinline__ float shifted_code(unsigned int word, int bit) {
#if defined(__CUDA_ARCH__)
  if constexpr (Format::kCodeBits == 8) {
    return float_of(__byte_perm(word, 0x4b000000u, 0x7440u + bit / 8));
  }
#endif
  return float_of(0x4b000000u | (word >> bit & ((1u << Format::kCodeBits) - 1u)));
}

// Calls `use(i, value)` with the values of a tile's codes; NaN, with unspecified bits, if the range is not usable.
template <typename Format, typename Tile, typename Use>
__device__ __forceinline__ void for_each_decoded(const Tile& tile, const Codes<Format, Tile>& codes, const Coder& coder,
                                                 const Use& use) {
  const float shift = 8388608.0f - coder.lowest;
  tile.for_each_element([&](int i, int) {
    const CodePlace<Format> place(i);
    use(i, dequantize_steps(shifted_code<Format>(codes[place.word], place.bit) - shift, coder));
  });
}

}  // namespace torchbagua::cuda
