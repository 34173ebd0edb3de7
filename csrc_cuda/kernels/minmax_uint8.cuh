// MinMaxUInt8 on CUDA. Every element is read once and written once, but for blocks that are longer than a tile: these
// are encoded in two passes.
#pragma once

#include "minmax_uint8_tile.cuh"

namespace torchbagua::cuda {

// Rows of equal layout, one from each sender, and what their sum is divided by.
struct Senders {
  const unsigned char* rows;
  long long num_rows;
  long long row_bytes;
  float divisor;
};

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
  static constexpr int kRowsAtOnce = 32;
  Senders senders;

  __device__ __forceinline__ bool fits(const Block& block) const {
    return is_aligned<kWidest>(senders.rows + block.payload) && senders.row_bytes % kWidest == 0;
  }

  template <int kWidth>
  __device__ __forceinline__ void load(const Tile<kWidth>& tile, const Block& block, Values<kWidth>& mean) const {
    __shared__ Coder coders[kRowsAtOnce];  // each unpacked by one thread
    fill(mean, 0.0f);                      // no value is -0, so the first sum is the value
    bool are_usable = true;
    for (long long first = 0; first < senders.num_rows; first += kRowsAtOnce) {
      const unsigned char* rows = senders.rows + first * senders.row_bytes;
      const long long rest = senders.num_rows - first;
      const int num_rows = static_cast<int>(rest < kRowsAtOnce ? rest : kRowsAtOnce);
      __syncthreads();  // all have read the coders of the rows before
      if (static_cast<int>(threadIdx.x) < num_rows) {
        coders[threadIdx.x] = make_coder(read_header(rows + threadIdx.x * senders.row_bytes + block.header));
      }
      __syncthreads();
#pragma unroll(kWidth == 1 ? 1 : 4)  // so many rows are on their way at once
      for (int row = 0; row < num_rows; ++row) {
        Codes<kWidth> codes;
        load_codes(tile, rows + row * senders.row_bytes + block.payload, codes);
        const Coder coder = coders[row];
        are_usable = are_usable && coder.lowest == coder.lowest;  // which is NaN where the header is not usable
        for_each_decoded(tile, codes, coder, [&](int i, float value) { mean[i] += value; });
      }
    }
    if (are_usable) {
      divide(mean, senders.divisor);
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
__device__ __forceinline__ void encode(const Source& source, long long num_elements, const Block* blocks,
                                       long long num_blocks, unsigned char* wire, long long wire_bytes) {
  constexpr int kWidest = Source::kWidest;
  for (long long b = blockIdx.x; b < num_blocks; b += gridDim.x) {
    const Block block = blocks[b];
    require_inside(block, sizeof(Header), block.length, num_elements, wire_bytes);
    if (block.length % kWidest == 0 && source.fits(block) && is_aligned<kWidest>(wire + block.payload)) {
      encode_block<kWidest>(source, block, wire);
    } else {
      encode_block<1>(source, block, wire);
    }
  }
}

template <typename Source, typename Element>
__device__ __forceinline__ void decode(const Source& source, long long row_bytes, const Block* blocks,
                                       long long num_blocks, Element* x, long long num_elements) {
  constexpr int kWidest = Source::kWidest;
  for (long long b = blockIdx.x; b < num_blocks; b += gridDim.x) {
    const Block block = blocks[b];
    require_inside(block, sizeof(Header), block.length, num_elements, row_bytes);
    if (block.length % kWidest == 0 && source.fits(block) && is_aligned<kWidest>(x + block.start)) {
      decode_block<kWidest>(source, block, x);
    } else {
      decode_block<1>(source, block, x);
    }
  }
}

// --- Kernels: "C" and no templates, for NVRTC's callers find a kernel by its plain name ---

#define TORCHBAGUA_KERNEL extern "C" __global__ void __launch_bounds__(kThreads, 8)

TORCHBAGUA_KERNEL torchbagua_minmax_uint8_encode_float32(const float* x, long long num_elements, const Block* blocks,
                                                         long long num_blocks, unsigned char* wire,
                                                         long long wire_bytes) {
  encode(Plain<float>{x}, num_elements, blocks, num_blocks, wire, wire_bytes);
}

TORCHBAGUA_KERNEL torchbagua_minmax_uint8_encode_bfloat16(const BFloat16* x, long long num_elements,
                                                          const Block* blocks, long long num_blocks,
                                                          unsigned char* wire, long long wire_bytes) {
  encode(Plain<BFloat16>{x}, num_elements, blocks, num_blocks, wire, wire_bytes);
}

TORCHBAGUA_KERNEL torchbagua_minmax_uint8_encode_float16(const Float16* x, long long num_elements, const Block* blocks,
                                                         long long num_blocks, unsigned char* wire,
                                                         long long wire_bytes) {
  encode(Plain<Float16>{x}, num_elements, blocks, num_blocks, wire, wire_bytes);
}

TORCHBAGUA_KERNEL torchbagua_minmax_uint8_decode_float32(const unsigned char* wire, long long wire_bytes,
                                                         const Block* blocks, long long num_blocks, float* x,
                                                         long long num_elements) {
  decode(OneRow<4>{wire}, wire_bytes, blocks, num_blocks, x, num_elements);
}

TORCHBAGUA_KERNEL torchbagua_minmax_uint8_decode_bfloat16(const unsigned char* wire, long long wire_bytes,
                                                          const Block* blocks, long long num_blocks, BFloat16* x,
                                                          long long num_elements) {
  decode(OneRow<8>{wire}, wire_bytes, blocks, num_blocks, x, num_elements);
}

TORCHBAGUA_KERNEL torchbagua_minmax_uint8_decode_float16(const unsigned char* wire, long long wire_bytes,
                                                         const Block* blocks, long long num_blocks, Float16* x,
                                                         long long num_elements) {
  decode(OneRow<8>{wire}, wire_bytes, blocks, num_blocks, x, num_elements);
}

TORCHBAGUA_KERNEL torchbagua_minmax_uint8_decode_mean(const unsigned char* rows, long long num_rows,
                                                      long long row_bytes, float divisor, const Block* blocks,
                                                      long long num_blocks, float* x, long long num_elements) {
  decode(Mean<4>{{rows, num_rows, row_bytes, divisor}}, row_bytes, blocks, num_blocks, x, num_elements);
}

TORCHBAGUA_KERNEL torchbagua_minmax_uint8_decode_mean_encode(const unsigned char* rows, long long num_rows,
                                                             long long row_bytes, float divisor, const Block* blocks,
                                                             long long num_blocks, unsigned char* wire) {
  // 16 bytes would fit half of all payloads: a header has 8.
  encode(Mean<8>{{rows, num_rows, row_bytes, divisor}}, kAnyStart, blocks, num_blocks, wire, row_bytes);
}

TORCHBAGUA_KERNEL torchbagua_minmax_uint8_encode_feedback(const float* x, const float* residual, long long num_elements,
                                                          const Block* blocks, long long num_blocks,
                                                          unsigned char* wire, long long wire_bytes, float* left_out) {
  encode(WithResidual{x, residual, left_out}, num_elements, blocks, num_blocks, wire, wire_bytes);
}

#undef TORCHBAGUA_KERNEL

}  // namespace torchbagua::cuda
