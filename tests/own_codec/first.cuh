// The kernels of tests/own_codec/first.py, as somebody else would add them: csrc_cuda/kernels/first.cuh. One thread
// does all of a block: that is short, and slow.
#pragma once

#include "blocks.cuh"

namespace torchbagua::cuda {
namespace first {

__device__ __forceinline__ float mean_of(const Rows& rows, const Block& block, float divisor) {
  float total = 0.0f;
  for (long long row = 0; row < rows.num_rows; ++row) {
    total += *reinterpret_cast<const float*>(rows.data + row * rows.row_bytes + block.payload);
  }
  return total / divisor;
}

// Calls `body(block, payload)` for every block of the table.
template <typename Byte, typename Body>
__device__ __forceinline__ void for_each_block(const Table& table, long long num_elements, Span<Byte> wire,
                                               const Body& body) {
  for (long long b = blockIdx.x; b < table.num_blocks; b += gridDim.x) {
    const Block block = table.blocks[b];
    require_inside(block, 0, sizeof(float), num_elements, wire.size);
    if (threadIdx.x == 0) {
      body(block, wire.data + block.payload);
    }
  }
}

template <typename T>
__device__ __forceinline__ void fill(float value, const Block& block, T* x) {
  for (long long i = block.start; i < block.start + block.length; ++i) {
    from_float(i == block.start ? value : 0.0f, x[i]);
  }
}

}  // namespace first

#define KERNEL extern "C" __global__ void
#define KERNELS_OF_TYPE(name, T)                                                                       \
  KERNEL torchbagua_first_encode_##name(Span<const T> x, Table table, Span<unsigned char> wire) {      \
    first::for_each_block(table, x.size, wire, [&](const Block& block, unsigned char* payload) {       \
      *reinterpret_cast<float*>(payload) = to_float(x.data[block.start]);                              \
    });                                                                                                \
  }                                                                                                    \
  KERNEL torchbagua_first_decode_##name(Span<const unsigned char> wire, Table table, Span<T> x) {      \
    first::for_each_block(table, x.size, wire, [&](const Block& block, const unsigned char* payload) { \
      first::fill(*reinterpret_cast<const float*>(payload), block, x.data);                            \
    });                                                                                                \
  }

KERNELS_OF_TYPE(float32, float)
KERNELS_OF_TYPE(bfloat16, BFloat16)
KERNELS_OF_TYPE(float16, Float16)

KERNEL torchbagua_first_decode_mean_float32(Rows rows, Table table, float divisor, Span<float> x) {
  const Span<const unsigned char> wire{rows.data, rows.row_bytes};
  first::for_each_block(table, x.size, wire, [&](const Block& block, const unsigned char*) {
    first::fill(first::mean_of(rows, block, divisor), block, x.data);
  });
}

KERNEL torchbagua_first_decode_mean_encode(Rows rows, Table table, float divisor, Span<unsigned char> wire) {
  first::for_each_block(table, kAnyStart, wire, [&](const Block& block, unsigned char* payload) {
    *reinterpret_cast<float*>(payload) = first::mean_of(rows, block, divisor);
  });
}

KERNEL torchbagua_first_encode_feedback_float32(Span<const float> x, Span<const float> residual, Table table,
                                                Span<unsigned char> wire, Span<float> left_out) {
  first::for_each_block(table, x.size, wire, [&](const Block& block, unsigned char* payload) {
    *reinterpret_cast<float*>(payload) = x.data[block.start] + residual.data[block.start];
    left_out.data[block.start] = 0.0f;
    for (long long i = block.start + 1; i < block.start + block.length; ++i) {
      left_out.data[i] = x.data[i] + residual.data[i];
    }
  });
}

#undef KERNELS_OF_TYPE
#undef KERNEL

TORCHBAGUA_CUDA_CODEC(first, 1)

}  // namespace torchbagua::cuda
