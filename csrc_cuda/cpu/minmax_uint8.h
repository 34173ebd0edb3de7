// The loops of MinMaxUInt8 over blocks.
#pragma once

#include <limits>

#include "codec.h"
#include "element/minmax_uint8.h"

namespace torchbagua::cpu {

// What make_header needs of a set of elements; empty to begin with.
struct Extremes {
  float min = std::numeric_limits<float>::infinity();
  float max = -std::numeric_limits<float>::infinity();
  int magnitude = 0;
};

TORCHBAGUA_ELEMENT void join(Extremes& extremes, const Extremes& other) {
  extremes.min = smaller(extremes.min, other.min);
  extremes.max = larger(extremes.max, other.max);
  extremes.magnitude = other.magnitude > extremes.magnitude ? other.magnitude : extremes.magnitude;
}

template <typename T>
TORCHBAGUA_ELEMENT Extremes extremes_of(const T* values, long long length) {
  float min[kLanes];
  float max[kLanes];
  int magnitude[kLanes];
  const Extremes empty;
#pragma omp simd
  for (long long lane = 0; lane < kLanes; ++lane) {
    min[lane] = empty.min;
    max[lane] = empty.max;
    magnitude[lane] = empty.magnitude;
  }
  long long first = 0;
  for (; first + kLanes <= length; first += kLanes) {
#pragma omp simd
    for (long long lane = 0; lane < kLanes; ++lane) {
      const float value = to_float(values[first + lane]);
      const int bits = magnitude_of(value);
      min[lane] = smaller(min[lane], value);
      max[lane] = larger(max[lane], value);
      magnitude[lane] = bits > magnitude[lane] ? bits : magnitude[lane];
    }
  }
  fold_lanes([&](long long lane, long long other) TORCHBAGUA_INLINED {
    min[lane] = smaller(min[lane], min[other]);
    max[lane] = larger(max[lane], max[other]);
    magnitude[lane] = std::max(magnitude[lane], magnitude[other]);
  });
  Extremes extremes{min[0], max[0], magnitude[0]};
  for (; first < length; ++first) {
    const float value = to_float(values[first]);
    join(extremes, Extremes{value, value, magnitude_of(value)});
  }
  return extremes;
}

template <typename T>
TORCHBAGUA_ELEMENT void quantize_all(const T* values, long long length, const Coder& coder, uint8_t* codes) {
#pragma omp simd
  for (long long i = 0; i < length; ++i) {
    codes[i] = quantize(to_float(values[i]), coder);
  }
}

struct MinMaxUInt8 : DenseCodec<MinMaxUInt8> {
  static constexpr const char* kName = "minmax_uint8";
  using Header = torchbagua::Header;
  static constexpr long long kHeaderBytes = sizeof(Header);

  static TORCHBAGUA_ELEMENT long long payload_bytes(long long length) { return length; }

  template <typename T>
  static TORCHBAGUA_ELEMENT void encode(const T* x, const Table& table, uint8_t* wire) {
    for (long long b = 0; b < table.num_blocks; ++b) {
      const Block block = table.blocks[b];
      const T* values = x + block.start;
      uint8_t* codes = wire + block.payload;
      const Extremes extremes = extremes_of(values, block.length);
      const Header header = make_header(extremes.min, extremes.max, extremes.magnitude);
      write_header(wire + block.header, header);
      if (!is_usable(header)) {
        std::memset(codes, 0, block.length);
        continue;
      }
      // While the codes are formed from the L1 cache the memory is idle. A fetch now and then keeps it busy, where all
      // of them at once would wait for each other.
      constexpr long long kStride = 128;
      const Coder coder = make_coder(header);
      const Block ahead = block_or_none(table, b + 2);
      for (long long first = 0; first < block.length; first += kStride) {
        prefetch(x + ahead.start + first, std::min(kStride, ahead.length - first));
        quantize_all(values + first, std::min(kStride, block.length - first), coder, codes + first);
      }
    }
  }

  template <typename T>
  static TORCHBAGUA_ELEMENT void decode_payload(Header header, const uint8_t* codes, long long length, T* values) {
    const Coder coder = make_coder(header);
#pragma omp simd
    for (long long i = 0; i < length; ++i) {
      from_float(dequantize(codes[i], coder), values[i]);
    }
  }

  template <typename Put>
  static TORCHBAGUA_ELEMENT void decode_each(Header header, const uint8_t* codes, long long length, const Put& put) {
    const Coder coder = make_coder(header);
#pragma omp simd
    for (long long i = 0; i < length; ++i) {
      put(i, dequantize(codes[i], coder));
    }
  }

  static TORCHBAGUA_ELEMENT void decode_mean_encode(const Rows& rows, const Table& table, float divisor,
                                                    uint8_t* wire) {
    alignas(64) float mean[kTile];
    for (long long b = 0; b < table.num_blocks; ++b) {
      const Block block = table.blocks[b];
      const Block next = block_or_none(table, b + 1);
      uint8_t* codes = wire + block.payload;
      Extremes extremes;
      for (long long first = 0; first < block.length; first += kTile) {
        const long long length = std::min(kTile, block.length - first);
        mean_of(rows, divisor, block, next, first, length, mean);
        join(extremes, extremes_of(mean, length));
      }
      const Header header = make_header(extremes.min, extremes.max, extremes.magnitude);
      write_header(wire + block.header, header);
      if (!is_usable(header)) {
        std::memset(codes, 0, block.length);
        continue;
      }
      const Coder coder = make_coder(header);
      for (long long first = 0; first < block.length; first += kTile) {
        const long long length = std::min(kTile, block.length - first);
        if (block.length > kTile) {  // a long block has passed through the tile: form its means again
          mean_of(rows, divisor, block, next, first, length, mean);
        }
        quantize_all(mean, length, coder, codes + first);
      }
    }
  }
};

TORCHBAGUA_CPU_CODEC(MinMaxUInt8)

}  // namespace torchbagua::cpu
