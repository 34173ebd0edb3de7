// Code shared by the codecs on the CPU: the blocks of a wire, and the loops over them that do not depend on the codec.
// One block, or one tile of a long block, stays in the L1 cache from the first read to the last. Everything is inlined
// into its caller, which determines the instructions to vectorize for.
//
// A codec is a struct of static members: kName, the prefix of its operations' names; kHeaderBytes; payload_bytes of a
// block of any length; and the six operations, over whole tables. DenseCodec implements most of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "element/blocks.h"
#include "instruction_set.h"

#if TORCHBAGUA_X86_TARGETS
#include <immintrin.h>
#endif

namespace torchbagua::cpu {

// The elements of a tile: 16 KiB of float32, half of a small L1 cache.
constexpr long long kTile = 4096;

// The number of independent running results. They hide the latency of a single one and let a compiler vectorize without
// permission to reorder floating-point operations; three times as many floats still fit the 16 registers of AVX2.
constexpr long long kLanes = 32;

// Joins the lanes by halves, down to lane 0: `join(i, j)` joins lane j into lane i.
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

// The length of most blocks in codecs with short blocks, a whole number of cache lines.
constexpr long long kPart = 128;

// Calls `body` with a length, which is a compile-time constant if it is kPart: then a loop over it has neither branches
// nor a remainder.
template <typename Body>
TORCHBAGUA_ELEMENT void with_length(long long length, const Body& body) {
  if (length == kPart) {
    body(kPart);
  } else {
    body(length);
  }
}

// Prefetches values that will be read soon: hardware prefetchers do not look past the end of a block.
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

#if TORCHBAGUA_X86_TARGETS
// The floats in a cache line, which AVX-512 writes with one instruction.
constexpr long long kLine = 16;

// Copies `num_lines` cache lines; `to` must be a multiple of 64 bytes.
__attribute__((target("avx512f"))) inline void write_lines_around_cache(const float* from, long long num_lines,
                                                                        float* to) {
  for (long long i = 0; i < num_lines * kLine; i += kLine) {
    _mm512_stream_ps(to + i, _mm512_loadu_ps(from + i));
  }
}
#endif

// Copies floats that will not be read soon. The stores bypass the cache, so the old content is not read first.
TORCHBAGUA_ELEMENT void write_around_cache(const float* from, long long length, float* to) {
  long long done = 0;
#if TORCHBAGUA_X86_TARGETS
  constexpr long long kWritten = 4;  // per store, 16-byte aligned, with SSE, which every x86-64 has
  const auto before_multiple_of = [=](long long width) TORCHBAGUA_INLINED {
    return -(reinterpret_cast<uintptr_t>(to) / sizeof(float)) % width;
  };
  done = std::min<long long>(length, before_multiple_of(kWritten));
  std::copy(from, from + done, to);
  const long long first_line = before_multiple_of(kLine);
  const bool has_lines = kInstructionSet == InstructionSet::kAvx512 && first_line + kLine <= length;
  for (long long until = has_lines ? first_line : length; done + kWritten <= until; done += kWritten) {
    _mm_stream_ps(to + done, _mm_loadu_ps(from + done));
  }
  if (has_lines) {
    const long long num_lines = (length - done) / kLine;
    write_lines_around_cache(from + done, num_lines, to + done);
    for (done += num_lines * kLine; done + kWritten <= length; done += kWritten) {
      _mm_stream_ps(to + done, _mm_loadu_ps(from + done));
    }
  }
#endif
  std::copy(from + done, from + length, to + done);
}

// Makes these stores visible before any later store, such as one that signals completion.
TORCHBAGUA_ELEMENT void finish_writes_around_cache() {
#if TORCHBAGUA_X86_TARGETS
  _mm_sfence();
#endif
}

// Block `b`, or an empty block past the end of the table.
TORCHBAGUA_ELEMENT Block block_or_none(const Table& table, long long b) {
  return b < table.num_blocks ? table.blocks[b] : Block{0, 0, 0, 0};
}

// Prefetches a part of a block, in x and in the wire. One of them will be written, but a write reads its cache lines
// first. Prefetching a part at a time keeps the memory busy while other blocks are coded from the L1 cache; prefetches
// of everything at once would wait for each other.
template <typename Codec, typename T>
TORCHBAGUA_ELEMENT void prefetch_part(const Block& block, long long first, const T* x, const uint8_t* wire) {
  const long long length = std::min(kPart, block.length - first);
  prefetch(x + block.start + first, length);
  prefetch(wire + block.payload + Codec::payload_bytes(first), Codec::payload_bytes(length));
}

// The most blocks that are coded together, so that vector instructions process several headers.
constexpr long long kBatch = 32;

// The number of blocks from `first` on that are coded together: blocks that fit a tile of `tile` elements, or a single
// longer block.
TORCHBAGUA_ELEMENT long long size_of_batch(const Table& table, long long first, long long tile = kTile) {
  long long num_elements = table.blocks[first].length;
  long long num_blocks = 1;
  for (; num_blocks < kBatch && first + num_blocks < table.num_blocks; ++num_blocks) {
    num_elements += table.blocks[first + num_blocks].length;
    if (num_elements > tile) {
      break;
    }
  }
  return num_blocks;
}

// How many elements ahead of their use terms are prefetched. The L1 cache fits the terms of three tensors and a tile.
constexpr long long kAhead = kTile / 4;

// A batch of blocks with values that are computed a part at a time: in half a tile, or in separate memory for a single
// block that does not fit.
struct FormedBlocks {
  float* tile;
  float* values;
  long long num_blocks;
  Block places[kBatch];  // the blocks, with the offsets of their values
  long long block;       // the block of the next part to compute
  long long first;       // where that part begins in the block
  const Block* blocks;
  std::vector<float> own;

  // `place` is a buffer for the values of all blocks, or null.
  TORCHBAGUA_ELEMENT void begin(const Table& table, long long b, float* place) {
    num_blocks = b < table.num_blocks ? size_of_batch(table, b, kTile / 2) : 0;
    blocks = table.blocks + b;
    block = first = 0;
    values = tile;
    if (num_blocks == 1 && blocks[0].length > kTile / 2) {
      if (place == nullptr) {
        own.resize(blocks[0].length);
      }
      values = place == nullptr ? own.data() : place + blocks[0].start;
    }
    long long offset = 0;
    for (long long i = 0; i < num_blocks; ++i) {
      places[i] = blocks[i];
      places[i].start = offset;
      offset += blocks[i].length;
    }
  }

  template <typename Form>
  TORCHBAGUA_ELEMENT void form_part(const Form& form) {
    if (block < num_blocks) {
      const long long length = blocks[block].length;
      form(blocks[block].start + first, std::min(kPart, length - first), values + places[block].start + first);
      first += kPart;
      if (first >= length) {
        ++block;
        first = 0;
      }
    }
  }
};

// The operations of a codec in which the payload of the elements from `first` on begins payload_bytes(first) later, for
// any multiple `first` of 64. The codec has:
// - Decoders: `read` reads the headers of a batch of blocks in a wire, and `of(i)` returns the decoder of block i;
// - decode_payload, which decodes one payload to any type of element;
// - decode_each, which calls `put(i, value)` with the floats of one payload;
// - encode_meanwhile, which encodes, and calls `meanwhile(ahead, first)` for every kPart of a block: `first` is the
//   start of the part, and `ahead` is a block that will be coded soon.
template <typename Codec>
struct DenseCodec {
  template <typename T>
  static TORCHBAGUA_ELEMENT void encode(const T* x, const Table& table, uint8_t* wire) {
    Codec::encode_meanwhile(x, table, wire, [=](long long ahead, long long first) TORCHBAGUA_INLINED {
      prefetch_part<Codec>(block_or_none(table, ahead), first, x, wire);
    });
  }

  // Decodes, applies `form(first, length, values)` in place to the values of each part of a block, which begins at
  // element `first`, and writes the result to x.
  template <typename Form>
  static TORCHBAGUA_ELEMENT void decode_formed(const uint8_t* wire, const Table& table, float* x, const Form& form) {
    alignas(64) float part[kPart];
    typename Codec::Decoders decoders;
    for (long long b = 0; b < table.num_blocks;) {
      const long long num_blocks = size_of_batch(table, b);
      decoders.read(wire, table.blocks + b, num_blocks);
      for (long long i = 0; i < num_blocks; ++i) {
        const Block block = table.blocks[b + i];
        const auto decoder = decoders.of(i);
        for (long long first = 0; first < block.length; first += kPart) {
          const long long length = std::min(kPart, block.length - first);
          Codec::decode_payload(decoder, wire + block.payload + Codec::payload_bytes(first), length, part);
          form(block.start + first, length, part);
          write_around_cache(part, length, x + block.start + first);
        }
      }
      b += num_blocks;
    }
    finish_writes_around_cache();
  }

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

  // Computes the mean of the blocks [b, b + num_blocks), which fit a tile, summed in row order; `place(i)` is the
  // destination of the i-th of them. For a longer block, computes the mean of the tile that begins at `first`.
  template <typename Place>
  static TORCHBAGUA_ELEMENT void mean_of(const Rows& rows, const Table& table, float divisor, long long b,
                                         long long num_blocks, long long first, const Place& place) {
    typename Codec::Decoders decoders;
    const float reciprocal = 1.0f / divisor;
    for (long long row = 0; row < rows.num_rows; ++row) {
      const bool is_last = row + 1 == rows.num_rows;
      const bool is_scaled = is_last && row > 0 && has_exact_reciprocal(divisor);  // divides in the last addition
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

  // Encodes sums and writes the new residual to left_out. `put_sums(b, num_blocks, place)` writes the sums of the
  // blocks [b, b + num_blocks), the i-th block to `place(i)`: in the cache, or in left_out if a block does not fit a
  // tile. `prefetch_terms(first, length)` prefetches the terms of the sums of these elements.
  template <typename PutSums, typename PrefetchTerms>
  static TORCHBAGUA_ELEMENT void encode_sums(const Table& table, uint8_t* wire, float* left_out,
                                             const PutSums& put_sums, const PrefetchTerms& prefetch_terms) {
    alignas(64) float tile[kTile];
    Block places[kBatch];  // the blocks, with the offsets of their sums
    typename Codec::Decoders decoders;
    for (long long b = 0; b < table.num_blocks;) {
      const long long num_blocks = size_of_batch(table, b);
      const Block* blocks = table.blocks + b;
      const bool fits = blocks[0].length <= kTile;
      float* const sums = fits ? tile : left_out;
      long long offset = fits ? 0 : blocks[0].start;
      for (long long i = 0; i < num_blocks; ++i) {
        places[i] = blocks[i];
        places[i].start = offset;
        offset += blocks[i].length;
      }
      put_sums(b, num_blocks, [&](long long i) TORCHBAGUA_INLINED { return sums + places[i].start; });
      Codec::encode(static_cast<const float*>(sums), Table{places, num_blocks, table.num_fields}, wire);
      decoders.read(wire, blocks, num_blocks);
      for (long long i = 0; i < num_blocks; ++i) {
        // Meanwhile, prefetch the terms of the next blocks, a part at a time.
        const Block next = block_or_none(table, b + num_blocks + i);
        const auto decoder = decoders.of(i);
        for (long long first = 0; first < blocks[i].length; first += kPart) {
          prefetch_terms(next.start + first, std::min(kPart, next.length - first));
          const long long length = std::min(kPart, blocks[i].length - first);
          float* part = sums + places[i].start + first;
          Codec::decode_each(decoder, wire + blocks[i].payload + Codec::payload_bytes(first), length,
                             [=](long long k, float value) TORCHBAGUA_INLINED { part[k] -= value; });
          if (fits) {
            write_around_cache(part, length, left_out + blocks[i].start + first);
          }
        }
      }
      b += num_blocks;
    }
    finish_writes_around_cache();
  }

  // Encodes the values that `form(first, length, to)` writes for a part of a block that begins at element `first`.
  // Writes the new residual to left_out unless that is null. The values of the next blocks are computed while these
  // blocks are encoded and their residual is written, so that memory accesses and computation overlap.
  template <typename Form>
  static TORCHBAGUA_ELEMENT void encode_formed(const Table& table, uint8_t* wire, float* left_out, const Form& form) {
    alignas(64) float tile[kTile];
    FormedBlocks halves[2];
    halves[0].tile = tile;
    halves[1].tile = tile + kTile / 2;
    halves[0].num_blocks = 0;
    typename Codec::Decoders decoders;
    long long half = 0;
    for (long long b = 0; b < table.num_blocks; half = 1 - half) {
      const FormedBlocks& these = halves[half];
      FormedBlocks& next = halves[1 - half];
      const Block* blocks = table.blocks + b;
      b += these.num_blocks;
      next.begin(table, b, left_out);
      Codec::encode_meanwhile(static_cast<const float*>(these.values),
                              Table{these.places, these.num_blocks, table.num_fields}, wire,
                              [&](long long, long long first) TORCHBAGUA_INLINED {
                                if (left_out == nullptr || first / kPart % 2 == 0) {
                                  next.form_part(form);
                                }
                              });
      const long long num_decoded = left_out == nullptr ? 0 : these.num_blocks;
      decoders.read(wire, blocks, num_decoded);
      for (long long i = 0, first = 0; i < num_decoded || next.block < next.num_blocks;) {
        next.form_part(form);
        if (i < num_decoded) {
          const long long length = std::min(kPart, blocks[i].length - first);
          float* const part = these.values + these.places[i].start + first;
          float* const place = left_out + blocks[i].start + first;
          Codec::decode_each(decoders.of(i), wire + blocks[i].payload + Codec::payload_bytes(first), length,
                             [=](long long k, float value) TORCHBAGUA_INLINED { part[k] -= value; });
          if (part != place) {
            write_around_cache(part, length, place);
          }
          first += kPart;
          if (first >= blocks[i].length) {
            ++i;
            first = 0;
          }
        }
      }
    }
    finish_writes_around_cache();
  }

  // Encodes the mean of the rows + residual, and writes the new residual to left_out.
  static TORCHBAGUA_ELEMENT void decode_mean_encode_feedback(const Rows& rows, const Table& table, float divisor,
                                                             const float* residual, uint8_t* wire, float* left_out) {
    const auto put_sums = [=](long long b, long long num_blocks, const auto& place) TORCHBAGUA_INLINED {
      for (long long first = 0; first < table.blocks[b].length; first += kTile) {
        mean_of(rows, table, divisor, b, num_blocks, first,
                [&](long long i) TORCHBAGUA_INLINED { return place(i) + first; });
      }
      for (long long i = 0; i < num_blocks; ++i) {
        const Block block = table.blocks[b + i];
        const float* left_before = residual + block.start;
        float* sum = place(i);
#pragma omp simd
        for (long long k = 0; k < block.length; ++k) {
          sum[k] += left_before[k];
        }
      }
    };
    encode_sums(table, wire, left_out, put_sums,
                [=](long long first, long long length) TORCHBAGUA_INLINED { prefetch(residual + first, length); });
  }
};

}  // namespace torchbagua::cpu
