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
#include <type_traits>

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

// Elements that most blocks of codecs with short blocks have, a whole number of cache lines.
constexpr long long kPart = 128;

// Calls `body` with a length, which is a constant where it is kPart: a loop over it has neither branches nor a
// remainder then.
template <typename Body>
TORCHBAGUA_ELEMENT void with_length(long long length, const Body& body) {
  if (length == kPart) {
    body(kPart);
  } else {
    body(length);
  }
}

// Starts to fetch what will be read soon: the processor's own prefetchers do not see past the end of a block.
template <typename T>
TORCHBAGUA_ELEMENT void prefetch(const T* values, long long all) {
#if defined(__GNUC__)
  with_length(all, [=](long long length) TORCHBAGUA_INLINED {
    constexpr long long kCacheLine = 64 / sizeof(T);
    for (long long i = 0; i < length; i += kCacheLine) {
      __builtin_prefetch(values + i);
    }
  });
#endif
}

// Block `b`, empty past the end of the table.
TORCHBAGUA_ELEMENT Block block_or_none(const Table& table, long long b) {
  return b < table.num_blocks ? table.blocks[b] : Block{0, 0, 0, 0};
}

// Starts to fetch a part of a block, in x and in the wire, one of which will be written: that reads its lines first. A
// part now and then keeps the memory busy while others are coded from the L1 cache, where all at once would wait for
// each other.
template <typename Codec, typename T>
TORCHBAGUA_ELEMENT void prefetch_part(const Block& block, long long first, const T* x, const uint8_t* wire) {
  const long long length = std::min(kPart, block.length - first);
  prefetch(x + block.start + first, length);
  prefetch(wire + block.payload + Codec::payload_bytes(first), Codec::payload_bytes(length));
}

// Blocks that are coded together, as what their headers say is worked out for several at once.
constexpr long long kBatch = 32;

// How many blocks, from `first` on, are coded together: they fit a tile, or it is a single one.
TORCHBAGUA_ELEMENT long long size_of_batch(const Table& table, long long first) {
  long long num_elements = table.blocks[first].length;
  long long num_blocks = 1;
  for (; num_blocks < kBatch && first + num_blocks < table.num_blocks; ++num_blocks) {
    num_elements += table.blocks[first + num_blocks].length;
    if (num_elements > kTile) {
      break;
    }
  }
  return num_blocks;
}

// Operations of a codec whose payload of the elements from `first` on begins payload_bytes(first) later, for any
// multiple `first` of 64. It has Decoders, whose `read` takes up the headers of a batch of blocks in a wire, and
// `of(i)` gives what its i-th block is decoded by; decode_payload, of one payload to any type of element; and
// decode_each, which calls `put(i, value)` with the floats of one payload.
template <typename Codec>
struct DenseCodec {
  template <typename T>
  static TORCHBAGUA_ELEMENT void decode(const uint8_t* wire, const Table& table, T* x) {
    typename Codec::Decoders decoders;
    for (long long b = 0; b < table.num_blocks;) {
      const long long num_blocks = size_of_batch(table, b);
      decoders.read(wire, table.blocks + b, num_blocks);
      for (long long i = 0; i < num_blocks; ++i) {
        const Block block = table.blocks[b + i];
        const Block ahead = block_or_none(table, b + num_blocks + i);
        const auto decoder = decoders.of(i);
        for (long long first = 0; first < block.length; first += kPart) {
          prefetch_part<Codec>(ahead, first, x, wire);
          Codec::decode_payload(decoder, wire + block.payload + Codec::payload_bytes(first),
                                std::min(kPart, block.length - first), x + block.start + first);
        }
      }
      b += num_blocks;
    }
  }

  // The mean of the blocks [b, b + num_blocks), which fit a tile, summed in row order; `place(i)` is where that of the
  // i-th of them goes. Of a longer block, the mean of the tile that begins at `first`.
  template <typename Place>
  static TORCHBAGUA_ELEMENT void mean_of(const Rows& rows, const Table& table, float divisor, long long b,
                                         long long num_blocks, long long first, const Place& place) {
    typename Codec::Decoders decoders;
    const float reciprocal = 1.0f / divisor;
    for (long long row = 0; row < rows.num_rows; ++row) {
      const bool is_last = row + 1 == rows.num_rows;
      const bool is_scaled = is_last && row > 0 && has_exact_reciprocal(divisor);  // while it is added
      const uint8_t* wire = rows.data + row * rows.row_bytes;
      decoders.read(wire, table.blocks + b, num_blocks);
      for (long long i = 0; i < num_blocks; ++i) {
        const Block block = table.blocks[b + i];
        const Block next = block_or_none(table, b + num_blocks + i);
        const uint8_t* payload = wire + block.payload + Codec::payload_bytes(first);
        const long long length = std::min(kTile, block.length - first);
        const auto decoder = decoders.of(i);
        float* mean = place(i);
        prefetch(wire + next.payload, Codec::payload_bytes(std::min(next.length, kTile)));
        if (row == 0) {
          Codec::decode_payload(decoder, payload, length, mean);
        } else if (is_scaled) {
          Codec::decode_each(decoder, payload, length, [=](long long k, float value) TORCHBAGUA_INLINED {
            mean[k] = (mean[k] + value) * reciprocal;
          });
        } else {
          Codec::decode_each(decoder, payload, length,
                             [=](long long k, float value) TORCHBAGUA_INLINED { mean[k] += value; });
        }
        if (is_last && !is_scaled) {
#pragma omp simd
          for (long long k = 0; k < length; ++k) {
            mean[k] /= divisor;
          }
        }
      }
    }
  }

  static TORCHBAGUA_ELEMENT void decode_mean(const Rows& rows, const Table& table, float divisor, float* x) {
    for (long long b = 0; b < table.num_blocks;) {
      const long long num_blocks = size_of_batch(table, b);
      for (long long first = 0; first < table.blocks[b].length; first += kTile) {
        mean_of(rows, table, divisor, b, num_blocks, first,
                [&](long long i) TORCHBAGUA_INLINED { return x + table.blocks[b + i].start + first; });
      }
      b += num_blocks;
    }
  }

  // Encodes x + residual, and writes what the wire leaves out of that, through which the sum has passed, batch by
  // batch.
  static TORCHBAGUA_ELEMENT void encode_feedback(const float* x, const float* residual, const Table& table,
                                                 uint8_t* wire, float* left_out) {
    typename Codec::Decoders decoders;
    for (long long b = 0; b < table.num_blocks;) {
      const long long num_blocks = size_of_batch(table, b);
      for (long long i = 0; i < num_blocks; ++i) {
        const Block block = table.blocks[b + i];
        const float* values = x + block.start;
        const float* left_before = residual + block.start;
        float* sum = left_out + block.start;
#pragma omp simd
        for (long long k = 0; k < block.length; ++k) {
          sum[k] = values[k] + left_before[k];
        }
      }
      // The x that is encoded is left_out: there the sum stands, at the places of the blocks.
      Codec::encode(left_out, Table{table.blocks + b, num_blocks, table.num_fields}, wire);
      decoders.read(wire, table.blocks + b, num_blocks);
      for (long long i = 0; i < num_blocks; ++i) {
        const Block block = table.blocks[b + i];
        // Meanwhile the next blocks are fetched, a little at a time.
        const Block next = block_or_none(table, b + num_blocks + i);
        const auto decoder = decoders.of(i);
        for (long long first = 0; first < block.length; first += kPart) {
          const long long ahead = std::min(kPart, next.length - first);
          prefetch(x + next.start + first, ahead);
          prefetch(residual + next.start + first, ahead);
          prefetch(left_out + next.start + first, ahead);
          float* part = left_out + block.start + first;
          Codec::decode_each(decoder, wire + block.payload + Codec::payload_bytes(first),
                             std::min(kPart, block.length - first),
                             [=](long long k, float value) TORCHBAGUA_INLINED { part[k] -= value; });
        }
      }
      b += num_blocks;
    }
  }
};

}  // namespace torchbagua::cpu
