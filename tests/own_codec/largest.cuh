// The kernels of tests/own_codec/largest.py, as somebody else would add them: csrc_cuda/kernels/largest.cuh. One thread
// does all of a block: that is short, and slow.
#pragma once

#include "blocks.cuh"

namespace torchbagua::cuda {
namespace largest {

// What a payload holds.
struct Element {
  int index;
  float value;
};

__device__ __forceinline__ Element read(const unsigned char* wire, const Block& block) {
  const Element element = *reinterpret_cast<const Element*>(wire + block.payload);
  const bool is_there = element.index >= 0 && element.index < block.length;
  return is_there ? element : Element{0, not_a_number()};
}

// Calls `body(block)` for every block of the table.
template <typename Body>
__device__ __forceinline__ void for_each_block(const Table& table, long long num_elements, long long wire_bytes,
                                               const Body& body) {
  for (long long b = blockIdx.x; b < table.num_blocks; b += gridDim.x) {
    const Block block = table.blocks[b];
    require_inside(block, 0, sizeof(Element), num_elements, wire_bytes);
    if (threadIdx.x == 0) {
      body(block);
    }
  }
}

// Writes the first of the largest of a block; `value_of(i)` is its element i.
template <typename ValueOf>
__device__ __forceinline__ Element encode(const Block& block, unsigned char* wire, const ValueOf& value_of) {
  Element largest{0, value_of(0)};
  for (int i = 1; i < block.length; ++i) {
    const float value = value_of(i);
    if (magnitude_of(value) > magnitude_of(largest.value)) {
      largest = Element{i, value};
    }
  }
  *reinterpret_cast<Element*>(wire + block.payload) = largest;
  return largest;
}

__device__ __forceinline__ float mean_at(const Rows& rows, const Block& block, float divisor, int i) {
  float total = 0.0f;
  for (long long row = 0; row < rows.num_rows; ++row) {
    const Element element = read(rows.data + row * rows.row_bytes, block);
    total += element.index == i ? element.value : 0.0f;
  }
  return total / divisor;
}

template <typename T>
__device__ __forceinline__ void encode_all(Span<const T> x, Table table, Span<unsigned char> wire) {
  for_each_block(table, x.size, wire.size, [&](const Block& block) {
    encode(block, wire.data, [&](int i) { return to_float(x.data[block.start + i]); });
  });
}

template <typename T>
__device__ __forceinline__ void decode_all(Span<const unsigned char> wire, Table table, Span<T> x) {
  for_each_block(table, x.size, wire.size, [&](const Block& block) {
    const Element element = read(wire.data, block);
    for (int i = 0; i < block.length; ++i) {
      from_float(i == element.index ? element.value : 0.0f, x.data[block.start + i]);
    }
  });
}

}  // namespace largest

#define KERNEL extern "C" __global__ void

KERNEL torchbagua_largest_encode_float32(Span<const float> x, Table table, Span<unsigned char> wire) {
  largest::encode_all(x, table, wire);
}

KERNEL torchbagua_largest_encode_bfloat16(Span<const BFloat16> x, Table table, Span<unsigned char> wire) {
  largest::encode_all(x, table, wire);
}

KERNEL torchbagua_largest_encode_float16(Span<const Float16> x, Table table, Span<unsigned char> wire) {
  largest::encode_all(x, table, wire);
}

KERNEL torchbagua_largest_decode_float32(Span<const unsigned char> wire, Table table, Span<float> x) {
  largest::decode_all(wire, table, x);
}

KERNEL torchbagua_largest_decode_bfloat16(Span<const unsigned char> wire, Table table, Span<BFloat16> x) {
  largest::decode_all(wire, table, x);
}

KERNEL torchbagua_largest_decode_float16(Span<const unsigned char> wire, Table table, Span<Float16> x) {
  largest::decode_all(wire, table, x);
}

KERNEL torchbagua_largest_decode_mean_float32(Rows rows, Table table, float divisor, Span<float> x) {
  largest::for_each_block(table, x.size, rows.row_bytes, [&](const Block& block) {
    for (int i = 0; i < block.length; ++i) {
      x.data[block.start + i] = largest::mean_at(rows, block, divisor, i);
    }
  });
}

KERNEL torchbagua_largest_decode_mean_encode(Rows rows, Table table, float divisor, Span<unsigned char> wire) {
  largest::for_each_block(table, kAnyStart, wire.size, [&](const Block& block) {
    largest::encode(block, wire.data, [&](int i) { return largest::mean_at(rows, block, divisor, i); });
  });
}

KERNEL torchbagua_largest_encode_feedback_float32(Span<const float> x, Span<const float> residual, Table table,
                                                  Span<unsigned char> wire, Span<float> left_out) {
  largest::for_each_block(table, x.size, wire.size, [&](const Block& block) {
    const auto sum = [&](int i) { return x.data[block.start + i] + residual.data[block.start + i]; };
    const largest::Element element = largest::encode(block, wire.data, sum);
    for (int i = 0; i < block.length; ++i) {
      left_out.data[block.start + i] = sum(i) - (i == element.index ? element.value : 0.0f);
    }
  });
}

#undef KERNEL

TORCHBAGUA_CUDA_CODEC(largest, 1)

}  // namespace torchbagua::cuda
