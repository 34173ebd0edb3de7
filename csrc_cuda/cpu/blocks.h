// What the codecs share on the CPU: the blocks of a wire, and the loops over them that do not depend on the codec. One
// block, or one tile of a long block, stays in the L1 cache from the first read to the last. Everything is inlined into
// its caller, which sets the instructions that it is vectorised for.
//
// A codec is a struct of static members: Header; payload_bytes; encode and decode_mean_encode of whole tables; decode
// of one payload to any type of element, and decode_each, which calls `put(i, value)` with the floats of one payload.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "element/casts.h"
#include "instruction_set.h"

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

// Elements: 16 KiB of float32, half of a small L1 cache.
constexpr int64_t kTile = 4096;

// Independent running results: they hide the latency of one, they let a compiler vectorise without licence to reorder
// floating-point operations, and three times as many floats still fit the 16 registers of AVX2.
constexpr int64_t kLanes = 32;

// Joins the lanes in halves, down to lane 0: `join(i, j)` takes lane j into lane i.
template <typename Join>
TORCHBAGUA_ELEMENT void fold_lanes(const Join& join) {
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
#pragma omp simd
    for (int64_t lane = 0; lane < width; ++lane) {
      join(lane, lane + width);
    }
  }
}

template <typename Header>
TORCHBAGUA_ELEMENT void write_header(uint8_t* at, Header header) {
  std::memcpy(at, &header, sizeof(Header));
}

template <typename Header>
TORCHBAGUA_ELEMENT Header read_header(const uint8_t* at) {
  Header header;
  std::memcpy(&header, at, sizeof(Header));
  return header;
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

template <typename Codec, typename T>
TORCHBAGUA_ELEMENT void decode(const uint8_t* wire, const Table& table, T* x) {
  for (int64_t b = 0; b < table.num_blocks; ++b) {
    const Block block = table.blocks[b];
    const auto header = read_header<typename Codec::Header>(wire + block.header);
    Codec::decode(header, wire + block.payload, block.length, x + block.start);
  }
}

// Rows of equal layout, one from each sender, and what their sum is divided by.
struct Senders {
  const uint8_t* rows;
  int64_t num_rows;
  int64_t row_bytes;
  float divisor;
};

// The mean of elements [first, first + length) of a block, summed in row order. `next` is the block that comes after;
// `first` is a multiple of kTile.
template <typename Codec>
TORCHBAGUA_ELEMENT void mean_of(const Senders& senders, const Block& block, const Block& next, int64_t first,
                                int64_t length, float* mean) {
  for (int64_t row = 0; row < senders.num_rows; ++row) {
    const uint8_t* wire = senders.rows + row * senders.row_bytes;
    const auto header = read_header<typename Codec::Header>(wire + block.header);
    const uint8_t* payload = wire + block.payload + Codec::payload_bytes(first);
    prefetch(wire + next.payload, Codec::payload_bytes(std::min(next.length, kTile)));
    if (row == 0) {
      Codec::decode(header, payload, length, mean);
    } else {
      Codec::decode_each(header, payload, length, [=](int64_t i, float value) TORCHBAGUA_INLINED { mean[i] += value; });
    }
  }
#pragma omp simd
  for (int64_t i = 0; i < length; ++i) {
    mean[i] /= senders.divisor;
  }
}

// The mean of all blocks, to x.
template <typename Codec>
TORCHBAGUA_ELEMENT void decode_mean(const Senders& senders, const Table& table, float* x) {
  for (int64_t b = 0; b < table.num_blocks; ++b) {
    const Block block = table.blocks[b];
    const Block next = block_or_none(table, b + 1);
    for (int64_t first = 0; first < block.length; first += kTile) {
      const int64_t length = std::min(kTile, block.length - first);
      mean_of<Codec>(senders, block, next, first, length, x + block.start + first);
    }
  }
}

// Encodes x + residual, and writes what the wire leaves out of that, through which the sum has passed, block by block.
template <typename Codec>
TORCHBAGUA_ELEMENT void encode_feedback(const float* x, const float* residual, const Table& table, uint8_t* wire,
                                        float* left_out) {
  for (int64_t b = 0; b < table.num_blocks; ++b) {
    const Block block = table.blocks[b];
    const float* values = x + block.start;
    const float* left_before = residual + block.start;
    float* sum = left_out + block.start;
#pragma omp simd
    for (int64_t i = 0; i < block.length; ++i) {
      sum[i] = values[i] + left_before[i];
    }
    Codec::encode(left_out, Table{&table.blocks[b], 1}, wire);
    const auto header = read_header<typename Codec::Header>(wire + block.header);
    // Meanwhile the next block is fetched, a little at a time: longer strides than this were slower.
    constexpr int64_t kStride = 64;
    const Block next = block_or_none(table, b + 1);
    for (int64_t first = 0; first < block.length; first += kStride) {
      const int64_t ahead = std::min(kStride, next.length - first);
      prefetch(x + next.start + first, ahead);
      prefetch(residual + next.start + first, ahead);
      prefetch(left_out + next.start + first, ahead);
      float* part = sum + first;
      Codec::decode_each(header, wire + block.payload + Codec::payload_bytes(first),
                         std::min(kStride, block.length - first),
                         [=](int64_t i, float value) TORCHBAGUA_INLINED { part[i] -= value; });
    }
  }
}

}  // namespace torchbagua::cpu
