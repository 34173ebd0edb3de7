// What the codecs share on the CPU: the blocks of a wire, and the loops over them that do not depend on the codec. One
// block, or one tile of a long block, stays in the L1 cache from the first read to the last. Everything is inlined into
// its caller, which sets the instructions that it is vectorised for.
//
// A codec is a struct of static members: kName, how the names of its operations begin; kHeaderBytes; payload_bytes of a
// block of any length; and the five operations, over whole tables. DenseCodec forms some of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "element/blocks.h"
#include "instruction_set.h"

namespace torchbagua::cpu {

// Elements: 16 KiB of float32, half of a small L1 cache.
constexpr long long kTile = 4096;

// Independent running results: they hide the latency of one, they let a compiler vectorise without licence to reorder
// floating-point operations, and three times as many floats still fit the 16 registers of AVX2.
constexpr long long kLanes = 32;

// Joins the lanes in halves, down to lane 0: `join(i, j)` takes lane j into lane i.
template <typename Join>
TORCHBAGUA_ELEMENT void fold_lanes(const Join& join) {
  for (long long width = kLanes / 2; width > 0; width /= 2) {
#pragma omp simd
    for (long long lane = 0; lane < width; ++lane) {
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
TORCHBAGUA_ELEMENT void prefetch(const T* values, long long length) {
#if defined(__GNUC__)
  constexpr long long kCacheLine = 64 / sizeof(T);
  for (long long i = 0; i < length; i += kCacheLine) {
    __builtin_prefetch(values + i);
  }
#endif
}

// Block `b`, empty past the end of the table.
TORCHBAGUA_ELEMENT Block block_or_none(const Table& table, long long b) {
  return b < table.num_blocks ? table.blocks[b] : Block{0, 0, 0, 0};
}

// Operations of a codec whose payload of the elements from `first` on begins payload_bytes(first) later, for any
// multiple `first` of 64. It has Header; decode_payload, of one payload to any type of element; and decode_each, which
// calls `put(i, value)` with the floats of one payload.
template <typename Codec>
struct DenseCodec {
  template <typename T>
  static TORCHBAGUA_ELEMENT void decode(const uint8_t* wire, const Table& table, T* x) {
    for (long long b = 0; b < table.num_blocks; ++b) {
      const Block block = table.blocks[b];
      const auto header = read_header<typename Codec::Header>(wire + block.header);
      Codec::decode_payload(header, wire + block.payload, block.length, x + block.start);
    }
  }

  // The mean of elements [first, first + length) of a block, summed in row order. `next` is the block that comes after;
  // `first` is a multiple of kTile.
  static TORCHBAGUA_ELEMENT void mean_of(const Rows& rows, float divisor, const Block& block, const Block& next,
                                         long long first, long long length, float* mean) {
    for (long long row = 0; row < rows.num_rows; ++row) {
      const uint8_t* wire = rows.data + row * rows.row_bytes;
      const auto header = read_header<typename Codec::Header>(wire + block.header);
      const uint8_t* payload = wire + block.payload + Codec::payload_bytes(first);
      prefetch(wire + next.payload, Codec::payload_bytes(std::min(next.length, kTile)));
      if (row == 0) {
        Codec::decode_payload(header, payload, length, mean);
      } else {
        Codec::decode_each(header, payload, length,
                           [=](long long i, float value) TORCHBAGUA_INLINED { mean[i] += value; });
      }
    }
#pragma omp simd
    for (long long i = 0; i < length; ++i) {
      mean[i] /= divisor;
    }
  }

  static TORCHBAGUA_ELEMENT void decode_mean(const Rows& rows, const Table& table, float divisor, float* x) {
    for (long long b = 0; b < table.num_blocks; ++b) {
      const Block block = table.blocks[b];
      const Block next = block_or_none(table, b + 1);
      for (long long first = 0; first < block.length; first += kTile) {
        const long long length = std::min(kTile, block.length - first);
        mean_of(rows, divisor, block, next, first, length, x + block.start + first);
      }
    }
  }

  // Encodes x + residual, and writes what the wire leaves out of that, through which the sum has passed, block by
  // block.
  static TORCHBAGUA_ELEMENT void encode_feedback(const float* x, const float* residual, const Table& table,
                                                 uint8_t* wire, float* left_out) {
    for (long long b = 0; b < table.num_blocks; ++b) {
      const Block block = table.blocks[b];
      const float* values = x + block.start;
      const float* left_before = residual + block.start;
      float* sum = left_out + block.start;
#pragma omp simd
      for (long long i = 0; i < block.length; ++i) {
        sum[i] = values[i] + left_before[i];
      }
      // The x that is encoded is left_out: there the sum stands, at the places of the block.
      Codec::encode(left_out, Table{&table.blocks[b], 1, table.num_fields}, wire);
      const auto header = read_header<typename Codec::Header>(wire + block.header);
      // Meanwhile the next block is fetched, a little at a time: longer strides than this were slower.
      constexpr long long kStride = 64;
      const Block next = block_or_none(table, b + 1);
      for (long long first = 0; first < block.length; first += kStride) {
        const long long ahead = std::min(kStride, next.length - first);
        prefetch(x + next.start + first, ahead);
        prefetch(residual + next.start + first, ahead);
        prefetch(left_out + next.start + first, ahead);
        float* part = sum + first;
        Codec::decode_each(header, wire + block.payload + Codec::payload_bytes(first),
                           std::min(kStride, block.length - first),
                           [=](long long i, float value) TORCHBAGUA_INLINED { part[i] -= value; });
      }
    }
  }
};

}  // namespace torchbagua::cpu
