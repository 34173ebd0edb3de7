// The loops of MinMaxUInt8 over blocks. One block, or one tile of a long block, stays in the L1 cache from the first
// read to the last. Everything is inlined into its caller, which sets the instructions that it is vectorised for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "element/minmax_uint8.h"

namespace torchbagua::cpu {

// A row of the block table; schema.py has the meaning of its fields.
struct Block {
  int64_t start;
  int64_t length;
  int64_t header;
  int64_t payload;
};

struct Table {
  const Block* blocks;
  int64_t num_blocks;
};

constexpr int64_t kHeaderBytes = sizeof(Header);

// Elements: 16 KiB of float32, half of a small L1 cache.
constexpr int64_t kTile = 4096;

// Independent running minima and maxima: they hide the latency of one, they let a compiler vectorise without licence to
// reorder floating-point operations, and three times as many floats still fit the 16 registers of AVX2.
constexpr int64_t kLanes = 32;

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
TORCHBAGUA_ELEMENT Extremes extremes_of(const T* values, int64_t length) {
  float min[kLanes];
  float max[kLanes];
  int magnitude[kLanes];
  const Extremes empty;
#pragma omp simd
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    min[lane] = empty.min;
    max[lane] = empty.max;
    magnitude[lane] = empty.magnitude;
  }
  int64_t first = 0;
  for (; first + kLanes <= length; first += kLanes) {
#pragma omp simd
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const float value = to_float(values[first + lane]);
      const int bits = magnitude_of(value);
      min[lane] = smaller(min[lane], value);
      max[lane] = larger(max[lane], value);
      magnitude[lane] = bits > magnitude[lane] ? bits : magnitude[lane];
    }
  }
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
#pragma omp simd
    for (int64_t lane = 0; lane < width; ++lane) {
      min[lane] = smaller(min[lane], min[lane + width]);
      max[lane] = larger(max[lane], max[lane + width]);
      magnitude[lane] = std::max(magnitude[lane], magnitude[lane + width]);
    }
  }
  Extremes extremes{min[0], max[0], magnitude[0]};
  for (; first < length; ++first) {
    const float value = to_float(values[first]);
    join(extremes, Extremes{value, value, magnitude_of(value)});
  }
  return extremes;
}

TORCHBAGUA_ELEMENT void write_header(uint8_t* at, Header header) { std::memcpy(at, &header, kHeaderBytes); }

TORCHBAGUA_ELEMENT Header read_header(const uint8_t* at) {
  Header header;
  std::memcpy(&header, at, kHeaderBytes);
  return header;
}

template <typename T>
TORCHBAGUA_ELEMENT void quantize_all(const T* values, int64_t length, const Coder& coder, uint8_t* codes) {
#pragma omp simd
  for (int64_t i = 0; i < length; ++i) {
    codes[i] = quantize(to_float(values[i]), coder);
  }
}

// Starts to fetch what will be read soon: the processor's own prefetchers do not see past the end of a block.
template <typename T>
TORCHBAGUA_ELEMENT void prefetch(const T* values, int64_t length) {
#if defined(__GNUC__)
  constexpr int64_t kCacheLine = 64 / sizeof(T);
  for (int64_t i = 0; i < length; i += kCacheLine) {
    __builtin_prefetch(values + i);
  }
#endif
}

// Block `b`, empty past the end of the table.
TORCHBAGUA_ELEMENT Block block_or_none(const Table& table, int64_t b) {
  return b < table.num_blocks ? table.blocks[b] : Block{0, 0, 0, 0};
}

template <typename T>
TORCHBAGUA_ELEMENT void encode(const T* x, const Table& table, uint8_t* wire) {
  for (int64_t b = 0; b < table.num_blocks; ++b) {
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
    // While the codes are formed from the L1 cache the memory is idle. A fetch now and then keeps it busy, where all of
    // them at once would wait for each other.
    constexpr int64_t kStride = 128;
    const Coder coder = make_coder(header);
    const Block ahead = block_or_none(table, b + 2);
    for (int64_t first = 0; first < block.length; first += kStride) {
      prefetch(x + ahead.start + first, std::min(kStride, ahead.length - first));
      quantize_all(values + first, std::min(kStride, block.length - first), coder, codes + first);
    }
  }
}

template <typename T>
TORCHBAGUA_ELEMENT void decode(const uint8_t* wire, const Table& table, T* x) {
  for (int64_t b = 0; b < table.num_blocks; ++b) {
    const Block block = table.blocks[b];
    const Coder coder = make_coder(read_header(wire + block.header));
    const uint8_t* codes = wire + block.payload;
    T* values = x + block.start;
#pragma omp simd
    for (int64_t i = 0; i < block.length; ++i) {
      from_float(dequantize(codes[i], coder), values[i]);
    }
  }
}

// Rows of equal layout, one from each sender, and what their sum is divided by.
struct Senders {
  const uint8_t* rows;
  int64_t num_rows;
  int64_t row_bytes;
  float divisor;
};

// The mean of elements [first, first + length) of a block, summed in row order. `next` is the block that comes after.
TORCHBAGUA_ELEMENT void mean_of(const Senders& senders, const Block& block, const Block& next, int64_t first,
                                int64_t length, float* mean) {
  for (int64_t row = 0; row < senders.num_rows; ++row) {
    const uint8_t* wire = senders.rows + row * senders.row_bytes;
    const Coder coder = make_coder(read_header(wire + block.header));
    const uint8_t* codes = wire + block.payload + first;
    prefetch(wire + next.payload, std::min(next.length, kTile));
    if (row == 0) {
#pragma omp simd
      for (int64_t i = 0; i < length; ++i) {
        mean[i] = dequantize(codes[i], coder);
      }
    } else {
#pragma omp simd
      for (int64_t i = 0; i < length; ++i) {
        mean[i] += dequantize(codes[i], coder);
      }
    }
  }
#pragma omp simd
  for (int64_t i = 0; i < length; ++i) {
    mean[i] /= senders.divisor;
  }
}

TORCHBAGUA_ELEMENT void decode_mean_encode(const Senders& senders, const Table& table, uint8_t* wire) {
  alignas(64) float mean[kTile];
  for (int64_t b = 0; b < table.num_blocks; ++b) {
    const Block block = table.blocks[b];
    const Block next = block_or_none(table, b + 1);
    uint8_t* codes = wire + block.payload;
    Extremes extremes;
    for (int64_t first = 0; first < block.length; first += kTile) {
      const int64_t length = std::min(kTile, block.length - first);
      mean_of(senders, block, next, first, length, mean);
      join(extremes, extremes_of(mean, length));
    }
    const Header header = make_header(extremes.min, extremes.max, extremes.magnitude);
    write_header(wire + block.header, header);
    if (!is_usable(header)) {
      std::memset(codes, 0, block.length);
      continue;
    }
    const Coder coder = make_coder(header);
    for (int64_t first = 0; first < block.length; first += kTile) {
      const int64_t length = std::min(kTile, block.length - first);
      if (block.length > kTile) {  // a long block has passed through the tile: form its means again
        mean_of(senders, block, next, first, length, mean);
      }
      quantize_all(mean, length, coder, codes + first);
    }
  }
}

}  // namespace torchbagua::cpu
