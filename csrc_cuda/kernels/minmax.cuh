// The min-max codecs on CUDA, templates over a format of element/ and the number of threads in a team. Every element is
// read once and written once, except in blocks longer than a tile, which are encoded in two passes.
#pragma once

#include "minmax_tile.cuh"

namespace torchbagua::cuda {

// --- Sources of values. They load a tile, kWidest elements at a time if the alignment of all addresses allows it. ---

template <typename Format, typename Element>
struct Plain {
  static constexpr int kWidest = kVectorBytes / sizeof(Element);
  const Element* x;

  __device__ __forceinline__ bool fits(const Block& block) const { return is_aligned<kWidest>(x + block.start); }

  template <typename Tile>
  __device__ __forceinline__ void load(const Tile& tile, const Block& block, Values<Tile>& values) const {
    for_each_loaded(tile, x + block.start, [&](int i, float value) { values[i] = value; });
  }

  // Called with the codes of the loaded values.
  template <typename Tile>
  __device__ __forceinline__ void keep(const Tile&, const Block&, const Coder&, const Codes<Format, Tile>&,
                                       Values<Tile>&) const {}
};

// Values plus a residual; stores the new residual.
template <typename Format>
struct WithResidual {
  static constexpr int kWidest = kVectorBytes / sizeof(float);
  const float* x;
  const float* residual;
  float* left_out;

  __device__ __forceinline__ bool fits(const Block& block) const {
    return is_aligned<kWidest>(x + block.start) && is_aligned<kWidest>(residual + block.start) &&
           is_aligned<kWidest>(left_out + block.start);
  }

  template <typename Tile>
  __device__ __forceinline__ void load(const Tile& tile, const Block& block, Values<Tile>& values) const {
    for_each_loaded(tile, x + block.start, [&](int i, float value) { values[i] = value; });
    for_each_loaded(tile, residual + block.start, [&](int i, float value) { values[i] += value; });
  }

  template <typename Tile>
  __device__ __forceinline__ void keep(const Tile& tile, const Block& block, const Coder& coder,
                                       const Codes<Format, Tile>& codes, Values<Tile>& values) const {
    for_each_decoded<Format>(tile, codes, coder, [&](int i, float value) { values[i] -= value; });
    store_values(tile, values, left_out + block.start);
  }
};

// Values decoded from one wire.
template <typename Format, int kWidestCodes>
struct OneRow {
  static constexpr int kWidest = kWidestCodes;
  const unsigned char* wire;

  __device__ __forceinline__ bool fits(const Block& block) const {
    return codes_fit<Format, kWidest>(wire + block.payload);
  }

  template <typename Tile>
  __device__ __forceinline__ void load(const Tile& tile, const Block& block, Values<Tile>& values) const {
    Codes<Format, Tile> codes;
    load_codes<Format>(tile, wire + block.payload, codes);
    const Range range = read_range<Format>(wire + block.header);
    if (is_usable(range)) {
      for_each_decoded<Format>(tile, codes, make_coder<Format>(range), [&](int i, float value) { values[i] = value; });
    } else {
      fill(values, not_a_number());
    }
  }
};

// The coders of the rows of one block, up to kRows at a time. Each is unpacked by one thread of the team. A team of all
// threads shares them in memory, and a part of a warp through its lanes, since its threads cannot synchronize with
// those of other teams.
template <typename Format, int kTeam>
class RowCoders {
 public:
  static constexpr bool kIsInMemory = kTeam == kThreads;
  static_assert(kIsInMemory || kTeam <= kWarpThreads, "a team is a part of a warp, or all threads");
  static constexpr int kRows = kIsInMemory ? 32 : kTeam;

  // `headers` is the first row's header of the block.
  __device__ __forceinline__ RowCoders(Coder* shared, const unsigned char* headers, long long row_bytes, int num_rows)
      : shared_(shared) {
    const int own = rank_in_team<kTeam>();
    if constexpr (kIsInMemory) {
      __syncthreads();  // all threads have read the coders of the previous rows
      if (own < num_rows) {
        shared_[own] = make_coder<Format>(read_range<Format>(headers + own * row_bytes));
      }
      __syncthreads();
    } else {  // threads without a row unpack the first row's header, which no thread asks them for
      own_ = make_coder<Format>(read_range<Format>(headers + (own < num_rows ? own : 0) * row_bytes));
    }
  }

  // All threads of the team must call it together.
  __device__ __forceinline__ Coder of(int row) const {
    if constexpr (kIsInMemory) {
      return shared_[row];
    } else {
      const int lane = static_cast<int>(threadIdx.x % kWarpThreads) / kTeam * kTeam + row;
      const unsigned int lanes = team_lanes<kTeam>();
      const float inverse = 0.0f;  // only for encoding
      return Coder{__shfl_sync(lanes, own_.min, lane),   __shfl_sync(lanes, own_.max, lane),
                   __shfl_sync(lanes, own_.pivot, lane), inverse,
                   __shfl_sync(lanes, own_.step, lane),  __shfl_sync(lanes, own_.lowest, lane)};
    }
  }

 private:
  Coder* shared_;  // in memory
  Coder own_;      // else
};

// The mean of the senders' values, summed in row order; NaN if a header is not usable.
template <typename Format, int kWidestCodes>
struct Mean {
  static constexpr int kWidest = kWidestCodes;
  template <typename Tile>
  static constexpr int kRowsInFlight = Tile::kIsNarrow ? 1 : 4;  // rows with concurrent loads of codes
  Rows rows;
  float divisor;

  __device__ __forceinline__ bool fits(const Block& block) const {
    return codes_fit<Format, kWidest>(rows.data + block.payload) &&
           codes_fit<Format, kWidest>(rows.data + rows.row_bytes + block.payload);
  }

  template <typename Tile>
  __device__ __forceinline__ void load(const Tile& tile, const Block& block, Values<Tile>& mean) const {
    using Coders = RowCoders<Format, Tile::kTeam>;
    __shared__ Coder shared[Coders::kIsInMemory ? Coders::kRows : 1];
    fill(mean, 0.0f);  // no value is -0, so the first sum is the first value
    bool are_usable = true;
    for (long long first = 0; first < rows.num_rows; first += Coders::kRows) {
      const unsigned char* wires = rows.data + first * rows.row_bytes;
      const long long rest = rows.num_rows - first;
      const int num_rows = static_cast<int>(rest < Coders::kRows ? rest : Coders::kRows);
      const Coders coders(shared, wires + block.header, rows.row_bytes, num_rows);
#pragma unroll 1
      for (int row = 0; row < num_rows; row += kRowsInFlight<Tile>) {
        // Each row has separate registers, so that no load waits for the sum of the row before. A missing row is
        // replaced by loading another row again: a branch would keep the registers of all rows live for longer.
        Codes<Format, Tile> codes[kRowsInFlight<Tile>];
#pragma unroll
        for (int i = 0; i < kRowsInFlight<Tile>; ++i) {
          const int other = row + i < num_rows ? row + i : row;
          load_codes<Format>(tile, wires + other * rows.row_bytes + block.payload, codes[i]);
        }
#pragma unroll
        for (int i = 0; i < kRowsInFlight<Tile>; ++i) {
          if (row + i < num_rows) {
            const Coder coder = coders.of(row + i);
            are_usable = are_usable && is_usable(coder);
            for_each_decoded<Format>(tile, codes[i], coder, [&](int k, float value) { mean[k] += value; });
          }
        }
      }
    }
    if (are_usable) {
      divide(mean, divisor);
    } else {
      fill(mean, not_a_number());
    }
  }

  template <typename Tile>
  __device__ __forceinline__ void keep(const Tile&, const Block&, const Coder&, const Codes<Format, Tile>&,
                                       Values<Tile>&) const {}
};

// --- Encoding and decoding of one block by a team ---

template <typename Format, typename Tile, typename Source>
__device__ __forceinline__ void write_tile(const Source& source, const Tile& tile, const Block& block,
                                           const Range& range, Values<Tile>& values, unsigned char* wire) {
  const Coder coder = make_coder<Format>(range);
  Codes<Format, Tile> codes;
  if (is_usable(range)) {
    quantize_tile<Format>(tile, values, coder, codes);
  } else {
    fill(codes, 0u);
  }
  store_codes<Format>(tile, codes, wire + block.payload);
  source.keep(tile, block, coder, codes, values);
}

template <typename Format, typename Tile, typename Source>
__device__ __forceinline__ void encode_block(const Source& source, const Block& block, unsigned char* wire) {
  Values<Tile> values;
  Extremes extremes;
  for (long long first = 0; first < block.length; first += Tile::kLength) {
    const auto tile = tile_at<Tile>(first, block.length);
    source.load(tile, block, values);
    join_tile(extremes, tile, values);
  }
  join_team<Tile::kTeam>(extremes);
  const Range range = make_range<Format>(extremes.min, extremes.max, extremes.magnitude);
  write_range<Format, Tile::kTeam>(range, wire + block.header);
  for (long long first = 0; first < block.length; first += Tile::kLength) {
    const auto tile = tile_at<Tile>(first, block.length);
    if (block.length > Tile::kLength) {  // otherwise they are still in registers
      source.load(tile, block, values);
    }
    write_tile<Format>(source, tile, block, range, values, wire);
  }
}

template <typename Tile, typename Source, typename Element>
__device__ __forceinline__ void decode_block(const Source& source, const Block& block, Element* x) {
  for (long long first = 0; first < block.length; first += Tile::kLength) {
    const auto tile = tile_at<Tile>(first, block.length);
    Values<Tile> values;
    source.load(tile, block, values);
    store_values(tile, values, x + block.start);
  }
}

// --- Loops over all blocks, for any number of thread blocks, each with kThreads / kTeam teams ---

template <typename Format>
__device__ __forceinline__ long long payload_bytes(long long length) {
  return Format::kCodeBits == 8 ? length : length / 2 + length % 2;
}

// Tiles for blocks with an alignment that allows no wider vectors: the codes of a vector are one byte.
template <typename Format, int kTeam>
using NarrowTile = Tile<kTeam, 8 / Format::kCodeBits>;

template <typename Format, int kTeam, typename Source>
__device__ __forceinline__ void encode(const Source& source, long long num_elements, const Table& table,
                                       const Span<unsigned char>& wire) {
  constexpr int kWidest = Source::kWidest;
  for_each_block<kTeam>(table, [&](const Block& block) {
    const long long num_bytes = payload_bytes<Format>(block.length);
    require_inside(block, sizeof(typename Format::Header), num_bytes, num_elements, wire.size);
    if (block.length % kWidest == 0 && source.fits(block) && codes_fit<Format, kWidest>(wire.data + block.payload)) {
      encode_block<Format, Tile<kTeam, kWidest>>(source, block, wire.data);
    } else {
      encode_block<Format, NarrowTile<Format, kTeam>>(source, block, wire.data);
    }
  });
}

template <typename Format, int kTeam, typename Source, typename Element>
__device__ __forceinline__ void decode(const Source& source, long long wire_bytes, const Table& table,
                                       const Span<Element>& x) {
  constexpr int kWidest = Source::kWidest;
  for_each_block<kTeam>(table, [&](const Block& block) {
    const long long num_bytes = payload_bytes<Format>(block.length);
    require_inside(block, sizeof(typename Format::Header), num_bytes, x.size, wire_bytes);
    if (block.length % kWidest == 0 && source.fits(block) && is_aligned<kWidest>(x.data + block.start)) {
      decode_block<Tile<kTeam, kWidest>>(source, block, x.data);
    } else {
      decode_block<NarrowTile<Format, kTeam>>(source, block, x.data);
    }
  });
}

}  // namespace torchbagua::cuda

// The kernels of a codec: extern "C" and not templates, since NVRTC's callers look up a kernel by its plain name. They
// take the arguments of their operation in order. If the operation has an x, its type is in the name. The kernel that
// encodes a mean loads 8 codes at a time: 16 would fit the alignment of only half of all payloads, since a header has 8
// bytes.
#define TORCHBAGUA_MINMAX_KERNEL extern "C" __global__ void __launch_bounds__(kThreads, 8)
#define TORCHBAGUA_MINMAX_KERNELS(codec, Format, kTeam)                                                               \
  TORCHBAGUA_MINMAX_KERNEL torchbagua_##codec##_encode_float32(Span<const float> x, Table table,                      \
                                                               Span<unsigned char> wire) {                            \
    encode<Format, kTeam>(Plain<Format, float>{x.data}, x.size, table, wire);                                         \
  }                                                                                                                   \
  TORCHBAGUA_MINMAX_KERNEL torchbagua_##codec##_encode_bfloat16(Span<const BFloat16> x, Table table,                  \
                                                                Span<unsigned char> wire) {                           \
    encode<Format, kTeam>(Plain<Format, BFloat16>{x.data}, x.size, table, wire);                                      \
  }                                                                                                                   \
  TORCHBAGUA_MINMAX_KERNEL torchbagua_##codec##_encode_float16(Span<const Float16> x, Table table,                    \
                                                               Span<unsigned char> wire) {                            \
    encode<Format, kTeam>(Plain<Format, Float16>{x.data}, x.size, table, wire);                                       \
  }                                                                                                                   \
  TORCHBAGUA_MINMAX_KERNEL torchbagua_##codec##_decode_float32(Span<const unsigned char> wire, Table table,           \
                                                               Span<float> x) {                                       \
    decode<Format, kTeam>(OneRow<Format, 4>{wire.data}, wire.size, table, x);                                         \
  }                                                                                                                   \
  TORCHBAGUA_MINMAX_KERNEL torchbagua_##codec##_decode_bfloat16(Span<const unsigned char> wire, Table table,          \
                                                                Span<BFloat16> x) {                                   \
    decode<Format, kTeam>(OneRow<Format, 8>{wire.data}, wire.size, table, x);                                         \
  }                                                                                                                   \
  TORCHBAGUA_MINMAX_KERNEL torchbagua_##codec##_decode_float16(Span<const unsigned char> wire, Table table,           \
                                                               Span<Float16> x) {                                     \
    decode<Format, kTeam>(OneRow<Format, 8>{wire.data}, wire.size, table, x);                                         \
  }                                                                                                                   \
  TORCHBAGUA_MINMAX_KERNEL torchbagua_##codec##_decode_mean_float32(Rows rows, Table table, float divisor,            \
                                                                    Span<float> x) {                                  \
    decode<Format, kTeam>(Mean<Format, 4>{rows, divisor}, rows.row_bytes, table, x);                                  \
  }                                                                                                                   \
  TORCHBAGUA_MINMAX_KERNEL torchbagua_##codec##_decode_mean_encode(Rows rows, Table table, float divisor,             \
                                                                   Span<unsigned char> wire) {                        \
    encode<Format, kTeam>(Mean<Format, 8>{rows, divisor}, kAnyStart, table, wire);                                    \
  }                                                                                                                   \
  TORCHBAGUA_MINMAX_KERNEL torchbagua_##codec##_encode_feedback_float32(                                              \
      Span<const float> x, Span<const float> residual, Table table, Span<unsigned char> wire, Span<float> left_out) { \
    encode<Format, kTeam>(WithResidual<Format>{x.data, residual.data, left_out.data}, x.size, table, wire);           \
  }                                                                                                                   \
  TORCHBAGUA_CUDA_CODEC(codec, kThreads / kTeam)
