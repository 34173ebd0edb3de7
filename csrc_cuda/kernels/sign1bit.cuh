// Sign1Bit on CUDA. A warp processes one block of the table after the other. Lane l has the elements l, l + 32, and so
// on, since their magnitudes form one of the 32 sums of docs/arithmetic.md. Loads are not vectorized, but the loads and
// stores of a warp cover consecutive elements.
#pragma once

#include "sign1bit_tile.cuh"

namespace torchbagua::cuda {
namespace sign1bit {

// --- Sources of values to encode. They load a tile, with zeros past its end, which do not change the sum. ---

template <typename Element>
struct Plain {
  using Tile = LaneTile<32>;
  const Element* x;

  __device__ __forceinline__ void load(const Tile& tile, const Block& block, Tile::Values& values) const {
    const Element* from = tile.own(x, block);
    tile.for_each_element([&](int i, int step, bool is_there) { values[i] = is_there ? to_float(from[step]) : 0.0f; });
  }

  __device__ __forceinline__ void keep(const Block&, float, Tile::Values&) const {}
};

// Values plus a residual; stores the new residual. A tile fits a block of 2048 elements, so that the values of such
// blocks are loaded once.
struct WithResidual {
  using Tile = LaneTile<64>;
  const float* x;
  const float* residual;
  float* left_out;

  __device__ __forceinline__ void load(const Tile& tile, const Block& block, Tile::Values& values) const {
    const float* from = tile.own(x, block);
    const float* added = tile.own(residual, block);
    tile.for_each_element([&](int i, int step, bool is_there) { values[i] = is_there ? from[step] : 0.0f; });
    tile.for_each_element([&](int i, int step, bool is_there) { values[i] += is_there ? added[step] : 0.0f; });
  }

  __device__ __forceinline__ void keep(const Block& block, float scale, Tile::Values& values) const {
    for (long long first = 0; first < block.length; first += Tile::kLength) {
      const Tile tile(first, block.length);
      if (block.length > Tile::kLength) {  // otherwise they are still in registers
        load(tile, block, values);
      }
      float* to = tile.own(left_out, block);
      tile.for_each_element([&](int i, int step, bool is_there) {
        if (is_there) {
          to[step] = values[i] - with_sign(scale, bits_of(values[i]));
        }
      });
    }
  }
};

// The mean of the senders' values, summed in row order; NaN if a header is not usable.
struct Mean {
  using Tile = LaneTile<32>;
  static constexpr int kRowsInFlight = 4;  // rows with concurrent loads of signs
  Rows rows;
  float divisor;

  __device__ __forceinline__ void load(const Tile& tile, const Block& block, Tile::Values& mean) const {
    fill(mean, -0.0f);  // so that the first sum is the first row's value, even -0
    const LaneBytes bytes(tile, 0);
    for (long long first = 0; first < rows.num_rows; first += kWarpThreads) {
      const unsigned char* wires = rows.data + first * rows.row_bytes;
      const long long rest = rows.num_rows - first;
      const int num_rows = static_cast<int>(rest < kWarpThreads ? rest : kWarpThreads);
      // Each lane reads the header of one row.
      const int own = lane_of_thread() < num_rows ? lane_of_thread() : 0;
      const float own_scale = read_scale(wires + own * rows.row_bytes + block.header);
#pragma unroll 1
      for (int row = 0; row < num_rows; row += kRowsInFlight) {
        unsigned int words[kRowsInFlight];
#pragma unroll
        for (int i = 0; i < kRowsInFlight; ++i) {
          const int other = row + i < num_rows ? row + i : row;
          words[i] = read_signs(wires + other * rows.row_bytes + block.payload + bytes.offset, bytes.count);
        }
#pragma unroll
        for (int i = 0; i < kRowsInFlight; ++i) {
          if (row + i < num_rows) {
            const float scale = __shfl_sync(kAllLanes, own_scale, row + i);
            const unsigned int signs = transpose(words[i]);
#pragma unroll
            for (int k = 0; k < Tile::kElements; ++k) {
              mean[k] += with_sign(scale, signs << (kWordBits - 1 - k));
            }
          }
        }
      }
    }
    divide(mean, divisor);
    if (!tile.is_whole) {
      tile.for_each_element([&](int i, int, bool is_there) { mean[i] = is_there ? mean[i] : 0.0f; });
    }
  }

  __device__ __forceinline__ void keep(const Block&, float, Tile::Values&) const {}
};

// --- Encoding of one block by a warp ---

// The sum over all lanes, on every lane. In each step, lanes i and i ^ width get the same sum.
__device__ __forceinline__ float total_of(float sum) {
#pragma unroll
  for (int width = kWarpThreads / 2; width > 0; width /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, width);
  }
  return sum;
}

template <typename Source>
__device__ __forceinline__ void encode_block(const Source& source, const Block& block, unsigned char* wire) {
  using Tile = typename Source::Tile;
  typename Tile::Values values;
  float sum = 0.0f;
  for (long long first = 0; first < block.length; first += Tile::kLength) {
    const Tile tile(first, block.length);
    source.load(tile, block, values);
    typename Tile::Signs signs = {};
#pragma unroll
    for (int i = 0; i < Tile::kElements; ++i) {
      sum += absolute(values[i]);
      signs[i / kWordBits] |= sign_mask(values[i]) & 1u << i % kWordBits;
    }
    store_signs(tile, signs, wire + block.payload);
  }
  const float scale = make_scale(total_of(sum), static_cast<float>(block.length));
  if (lane_of_thread() < kWordBytes) {  // byte by byte, since a wire can have any alignment
    wire[block.header + lane_of_thread()] = static_cast<unsigned char>(bits_of(scale) >> (8 * lane_of_thread()));
  }
  if (!is_usable(scale)) {
    for (long long first = 0; first < block.length; first += Tile::kLength) {
      store_signs(Tile(first, block.length), typename Tile::Signs{}, wire + block.payload);
    }
  }
  source.keep(block, scale, values);
}

// --- Loops over all blocks, for any number of thread blocks, each with two warps ---

template <typename Source>
__device__ __forceinline__ void encode(const Source& source, long long num_elements, const Table& table,
                                       const Span<unsigned char>& wire) {
  for_each_block<kWarpThreads>(table, [&](const Block& block) {
    require_inside(block, kWordBytes, payload_bytes(block.length), num_elements, wire.size);
    encode_block(source, block, wire.data);
  });
}

template <typename Element>
__device__ __forceinline__ void decode(const Span<const unsigned char>& wire, const Table& table,
                                       const Span<Element>& x) {
  using Tile = LaneTile<32>;
  for_each_block<kWarpThreads>(table, [&](const Block& block) {
    require_inside(block, kWordBytes, payload_bytes(block.length), x.size, wire.size);
    const auto scale = make_signed_scale<Element>(float_of(read_word(wire.data + block.header)));
    for (long long first = 0; first < block.length; first += Tile::kLength) {
      const Tile tile(first, block.length);
      const LaneBytes bytes(tile, 0);
      const unsigned int signs = transpose(read_signs(wire.data + block.payload + bytes.offset, bytes.count));
      Element* to = tile.own(x.data, block);
      tile.for_each_element([&](int i, int step, bool is_there) {
        if (is_there) {
          to[step] = (signs >> i & 1u) != 0 ? scale.negative : scale.positive;
        }
      });
    }
  });
}

__device__ __forceinline__ void decode_mean(const Mean& mean, const Table& table, const Span<float>& x) {
  for_each_block<kWarpThreads>(table, [&](const Block& block) {
    require_inside(block, kWordBytes, payload_bytes(block.length), x.size, mean.rows.row_bytes);
    for (long long first = 0; first < block.length; first += Mean::Tile::kLength) {
      const Mean::Tile tile(first, block.length);
      Mean::Tile::Values values;
      mean.load(tile, block, values);
      float* to = tile.own(x.data, block);
      tile.for_each_element([&](int i, int step, bool is_there) {
        if (is_there) {
          to[step] = values[i];
        }
      });
    }
  });
}

}  // namespace sign1bit

// --- Kernels, like those of TORCHBAGUA_MINMAX_KERNELS ---

#define TORCHBAGUA_KERNEL extern "C" __global__ void __launch_bounds__(kThreads, 8)

TORCHBAGUA_KERNEL torchbagua_sign1bit_encode_float32(Span<const float> x, Table table, Span<unsigned char> wire) {
  sign1bit::encode(sign1bit::Plain<float>{x.data}, x.size, table, wire);
}

TORCHBAGUA_KERNEL torchbagua_sign1bit_encode_bfloat16(Span<const BFloat16> x, Table table, Span<unsigned char> wire) {
  sign1bit::encode(sign1bit::Plain<BFloat16>{x.data}, x.size, table, wire);
}

TORCHBAGUA_KERNEL torchbagua_sign1bit_encode_float16(Span<const Float16> x, Table table, Span<unsigned char> wire) {
  sign1bit::encode(sign1bit::Plain<Float16>{x.data}, x.size, table, wire);
}

TORCHBAGUA_KERNEL torchbagua_sign1bit_decode_float32(Span<const unsigned char> wire, Table table, Span<float> x) {
  sign1bit::decode(wire, table, x);
}

TORCHBAGUA_KERNEL torchbagua_sign1bit_decode_bfloat16(Span<const unsigned char> wire, Table table, Span<BFloat16> x) {
  sign1bit::decode(wire, table, x);
}

TORCHBAGUA_KERNEL torchbagua_sign1bit_decode_float16(Span<const unsigned char> wire, Table table, Span<Float16> x) {
  sign1bit::decode(wire, table, x);
}

TORCHBAGUA_KERNEL torchbagua_sign1bit_decode_mean_float32(Rows rows, Table table, float divisor, Span<float> x) {
  sign1bit::decode_mean(sign1bit::Mean{rows, divisor}, table, x);
}

TORCHBAGUA_KERNEL torchbagua_sign1bit_decode_mean_encode(Rows rows, Table table, float divisor,
                                                         Span<unsigned char> wire) {
  sign1bit::encode(sign1bit::Mean{rows, divisor}, kAnyStart, table, wire);
}

TORCHBAGUA_KERNEL torchbagua_sign1bit_encode_feedback_float32(Span<const float> x, Span<const float> residual,
                                                              Table table, Span<unsigned char> wire,
                                                              Span<float> left_out) {
  sign1bit::encode(sign1bit::WithResidual{x.data, residual.data, left_out.data}, x.size, table, wire);
}

#undef TORCHBAGUA_KERNEL

TORCHBAGUA_CUDA_CODEC(sign1bit, kThreads / kWarpThreads)

}  // namespace torchbagua::cuda
