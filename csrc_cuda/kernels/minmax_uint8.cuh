// MinMaxUInt8 on CUDA. Every element is read once and written once, but for blocks that are longer than a tile: these
// are encoded in two passes.
#pragma once

#include "minmax_uint8_tile.cuh"

namespace torchbagua::cuda {

// --- Sources: what is encoded or decoded. They load a tile, kWidest elements at once where all addresses allow it. ---

template <typename Element>
struct Plain {
  static constexpr int kWidest = kVectorBytes / sizeof(Element);
  const Element* x;

  __device__ __forceinline__ bool fits(const Block& block) const { return is_aligned<kWidest>(x + block.start); }

  template <int kWidth>
  __device__ __forceinline__ void load(const Tile<kWidth>& tile, const Block& block, Values<kWidth>& values) const {
    for_each_loaded(tile, x + block.start, [&](int i, float value) { values[i] = value; });
  }

  // Told of the codes of what has been loaded.
  template <int kWidth>
  __device__ __forceinline__ void keep(const Tile<kWidth>&, const Block&, const Coder&, const Codes<kWidth>&,
                                       Values<kWidth>&) const {}
};

// Values with a residual added; keeps what their codes leave out.
struct WithResidual {
  static constexpr int kWidest = kVectorBytes / sizeof(float);
  const float* x;
  const float* residual;
  float* left_out;

  __device__ __forceinline__ bool fits(const Block& block) const {
    return is_aligned<kWidest>(x + block.start) && is_aligned<kWidest>(residual + block.start) &&
           is_aligned<kWidest>(left_out + block.start);
  }

  template <int kWidth>
  __device__ __forceinline__ void load(const Tile<kWidth>& tile, const Block& block, Values<kWidth>& values) const {
    for_each_loaded(tile, x + block.start, [&](int i, float value) { values[i] = value; });
    for_each_loaded(tile, residual + block.start, [&](int i, float value) { values[i] += value; });
  }

  template <int kWidth>
  __device__ __forceinline__ void keep(const Tile<kWidth>& tile, const Block& block, const Coder& coder,
                                       const Codes<kWidth>& codes, Values<kWidth>& values) const {
    for_each_decoded(tile, codes, coder, [&](int i, float value) { values[i] -= value; });
    store_values(tile, values, left_out + block.start);
  }
};

// Values from their codes.
template <int kWidestCodes>
struct OneRow {
  static constexpr int kWidest = kWidestCodes;
  const unsigned char* wire;

  __device__ __forceinline__ bool fits(const Block& block) const { return is_aligned<kWidest>(wire + block.payload); }

  template <int kWidth>
  __device__ __forceinline__ void load(const Tile<kWidth>& tile, const Block& block, Values<kWidth>& values) const {
    Codes<kWidth> codes;
    load_codes(tile, wire + block.payload, codes);
    const Header header = read_header(wire + block.header);
    if (is_usable(header)) {
      for_each_decoded(tile, codes, make_coder(header), [&](int i, float value) { values[i] = value; });
    } else {
      fill(values, not_a_number());
    }
  }
};

// The mean of the senders' copies, added in row order; NaN where a header is not usable.
template <int kWidestCodes>
struct Mean {
  static constexpr int kWidest = kWidestCodes;
  static constexpr int kCoders = 32;  // unpacked at once, each by one thread
  template <int kWidth>
  static constexpr int kRowsInFlight = kWidth == 1 ? 1 : 4;  // whose codes are on their way at once
  Rows rows;
  float divisor;

  __device__ __forceinline__ bool fits(const Block& block) const {
    return is_aligned<kWidest>(rows.data + block.payload) && rows.row_bytes % kWidest == 0;
  }

  template <int kWidth>
  __device__ __forceinline__ void load(const Tile<kWidth>& tile, const Block& block, Values<kWidth>& mean) const {
    __shared__ Coder coders[kCoders];
    fill(mean, 0.0f);  // no value is -0, so the first sum is the value
    bool are_usable = true;
    for (long long first = 0; first < rows.num_rows; first += kCoders) {
      const unsigned char* wires = rows.data + first * rows.row_bytes;
      const long long rest = rows.num_rows - first;
      const int num_rows = static_cast<int>(rest < kCoders ? rest : kCoders);
      __syncthreads();  // all have read the coders of the rows before
      if (static_cast<int>(threadIdx.x) < num_rows) {
        coders[threadIdx.x] = make_coder(read_header(wires + threadIdx.x * rows.row_bytes + block.header));
      }
      __syncthreads();
#pragma unroll 1
      for (int row = 0; row < num_rows; row += kRowsInFlight<kWidth>) {
        // Every row in registers of its own, so that no load waits for the sum of the row before. In the place of one
        // that is not there another is loaded again: a branch would hold the registers of all of them longer.
        Codes<kWidth> codes[kRowsInFlight<kWidth>];
#pragma unroll
        for (int i = 0; i < kRowsInFlight<kWidth>; ++i) {
          const int other = row + i < num_rows ? row + i : row;
          load_codes(tile, wires + other * rows.row_bytes + block.payload, codes[i]);
        }
#pragma unroll
        for (int i = 0; i < kRowsInFlight<kWidth>; ++i) {
          if (row + i < num_rows) {
            const Coder coder = coders[row + i];
            are_usable = are_usable && coder.lowest == coder.lowest;  // which is NaN where the header is not usable
            for_each_decoded(tile, codes[i], coder, [&](int k, float value) { mean[k] += value; });
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

  template <int kWidth>
  __device__ __forceinline__ void keep(const Tile<kWidth>&, const Block&, const Coder&, const Codes<kWidth>&,
                                       Values<kWidth>&) const {}
};

// --- Encoding and decoding of one block, by all threads ---

template <int kWidth, typename Source>
__device__ __forceinline__ void write_tile(const Source& source, const Tile<kWidth>& tile, const Block& block,
                                           const Header& header, Values<kWidth>& values, unsigned char* wire) {
  const Coder coder = make_coder(header);
  Codes<kWidth> codes;
  if (is_usable(header)) {
    quantize_tile(tile, values, coder, codes);
  } else {
    fill(codes, 0u);
  }
  store_codes(tile, codes, wire + block.payload);
  source.keep(tile, block, coder, codes, values);
}

template <int kWidth, typename Source>
__device__ __forceinline__ void encode_block(const Source& source, const Block& block, unsigned char* wire) {
  Values<kWidth> values;
  Extremes extremes;
  for (long long first = 0; first < block.length; first += kTile<kWidth>) {
    const auto tile = tile_at<kWidth>(first, block.length);
    source.load(tile, block, values);
    join_tile(extremes, tile, values);
  }
  const Header header = make_header(extremes);
  write_header(header, wire + block.header);
  for (long long first = 0; first < block.length; first += kTile<kWidth>) {
    const auto tile = tile_at<kWidth>(first, block.length);
    if (block.length > kTile<kWidth>) {  // else they are still there
      source.load(tile, block, values);
    }
    write_tile(source, tile, block, header, values, wire);
  }
}

template <int kWidth, typename Source, typename Element>
__device__ __forceinline__ void decode_block(const Source& source, const Block& block, Element* x) {
  for (long long first = 0; first < block.length; first += kTile<kWidth>) {
    const auto tile = tile_at<kWidth>(first, block.length);
    Values<kWidth> values;
    source.load(tile, block, values);
    store_values(tile, values, x + block.start);
  }
}

// --- Of all blocks. Any number of thread blocks does. ---

template <typename Source>
__device__ __forceinline__ void encode(const Source& source, long long num_elements, const Table& table,
                                       const Span<unsigned char>& wire) {
  constexpr int kWidest = Source::kWidest;
  for (long long b = blockIdx.x; b < table.num_blocks; b += gridDim.x) {
    const Block block = table.blocks[b];
    require_inside(block, sizeof(Header), block.length, num_elements, wire.size);
    if (block.length % kWidest == 0 && source.fits(block) && is_aligned<kWidest>(wire.data + block.payload)) {
      encode_block<kWidest>(source, block, wire.data);
    } else {
      encode_block<1>(source, block, wire.data);
    }
  }
}

template <typename Source, typename Element>
__device__ __forceinline__ void decode(const Source& source, long long wire_bytes, const Table& table,
                                       const Span<Element>& x) {
  constexpr int kWidest = Source::kWidest;
  for (long long b = blockIdx.x; b < table.num_blocks; b += gridDim.x) {
    const Block block = table.blocks[b];
    require_inside(block, sizeof(Header), block.length, x.size, wire_bytes);
    if (block.length % kWidest == 0 && source.fits(block) && is_aligned<kWidest>(x.data + block.start)) {
      decode_block<kWidest>(source, block, x.data);
    } else {
      decode_block<1>(source, block, x.data);
    }
  }
}

// --- Kernels: "C" and no templates, for NVRTC's callers find a kernel by its plain name. They take the arguments of
// their operation in its order, and have the type of x in their name where there is one. ---

#define TORCHBAGUA_KERNEL extern "C" __global__ void __launch_bounds__(kThreads, 8)

TORCHBAGUA_KERNEL torchbagua_minmax_uint8_encode_float32(Span<const float> x, Table table, Span<unsigned char> wire) {
  encode(Plain<float>{x.data}, x.size, table, wire);
}

TORCHBAGUA_KERNEL torchbagua_minmax_uint8_encode_bfloat16(Span<const BFloat16> x, Table table,
                                                          Span<unsigned char> wire) {
  encode(Plain<BFloat16>{x.data}, x.size, table, wire);
}

TORCHBAGUA_KERNEL torchbagua_minmax_uint8_encode_float16(Span<const Float16> x, Table table, Span<unsigned char> wire) {
  encode(Plain<Float16>{x.data}, x.size, table, wire);
}

TORCHBAGUA_KERNEL torchbagua_minmax_uint8_decode_float32(Span<const unsigned char> wire, Table table, Span<float> x) {
  decode(OneRow<4>{wire.data}, wire.size, table, x);
}

TORCHBAGUA_KERNEL torchbagua_minmax_uint8_decode_bfloat16(Span<const unsigned char> wire, Table table,
                                                          Span<BFloat16> x) {
  decode(OneRow<8>{wire.data}, wire.size, table, x);
}

TORCHBAGUA_KERNEL torchbagua_minmax_uint8_decode_float16(Span<const unsigned char> wire, Table table, Span<Float16> x) {
  decode(OneRow<8>{wire.data}, wire.size, table, x);
}

TORCHBAGUA_KERNEL torchbagua_minmax_uint8_decode_mean_float32(Rows rows, Table table, float divisor, Span<float> x) {
  decode(Mean<4>{rows, divisor}, rows.row_bytes, table, x);
}

TORCHBAGUA_KERNEL torchbagua_minmax_uint8_decode_mean_encode(Rows rows, Table table, float divisor,
                                                             Span<unsigned char> wire) {
  // 16 bytes would fit half of all payloads: a header has 8.
  encode(Mean<8>{rows, divisor}, kAnyStart, table, wire);
}

TORCHBAGUA_KERNEL torchbagua_minmax_uint8_encode_feedback_float32(Span<const float> x, Span<const float> residual,
                                                                  Table table, Span<unsigned char> wire,
                                                                  Span<float> left_out) {
  encode(WithResidual{x.data, residual.data, left_out.data}, x.size, table, wire);
}

#undef TORCHBAGUA_KERNEL

TORCHBAGUA_CUDA_CODEC(minmax_uint8)

}  // namespace torchbagua::cuda
