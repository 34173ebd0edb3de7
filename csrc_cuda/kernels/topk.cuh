// TopK on CUDA. A thread block takes one block of the table after the other, and holds its values in shared memory.
//
// The smallest magnitude that is kept is found bit by bit, from the highest: a bit is set where enough magnitudes are
// no smaller. Nothing depends on the order in which threads run.
#pragma once

#include "../element/topk.h"
#include "blocks.cuh"

namespace torchbagua::cuda {
namespace topk {

constexpr int kWordBits = 32;
constexpr int kWords = kLongestSparseBlock / kWordBits;
constexpr unsigned int kAllLanes = 0xffffffffu;

static_assert(kThreads % kWarpThreads == 0 && kWordBits == kWarpThreads, "a warp's lanes are the bits of a word");

// What the threads share of a block. A bit of a word stands for an element.
struct Shared {
  float values[kLongestSparseBlock];
  unsigned short indices[kLongestSparseBlock];  // of what is kept, ascending
  unsigned int larger[kWords];                  // than the smallest magnitude that is kept
  unsigned int equal[kWords];                   // to it
  unsigned int kept[kWords];
  int counts[2][kWarps];
  bool is_spoiled;
};

// Calls `body(i)` for numbers below `count`, which the threads share out. All of a warp call it equally often where
// `count` is a multiple of kThreads.
template <typename Body>
__device__ __forceinline__ void for_each(long long count, const Body& body) {
  for (long long i = threadIdx.x; i < count; i += kThreads) {
    body(static_cast<int>(i));
  }
}

// The sum over all threads; `turn` alternates from call to call.
__device__ __forceinline__ int sum_over_threads(Shared& shared, int own, int turn) {
#pragma unroll
  for (int lane = kWarpThreads / 2; lane > 0; lane /= 2) {
    own += __shfl_xor_sync(kAllLanes, own, lane);
  }
  if (threadIdx.x % kWarpThreads == 0) {
    shared.counts[turn & 1][threadIdx.x / kWarpThreads] = own;
  }
  __syncthreads();
  int sum = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    sum += shared.counts[turn & 1][warp];
  }
  return sum;
}

__device__ __forceinline__ int num_not_below(Shared& shared, long long length, int magnitude, int turn) {
  int count = 0;
  for_each(length, [&](int i) { count += magnitude_of(shared.values[i]) >= magnitude; });
  return sum_over_threads(shared, count, turn);
}

// A magnitude of which no smaller one is kept of shared.values, and all larger ones are.
__device__ __forceinline__ int smallest_kept(Shared& shared, const SparseBlock& block) {
  int smallest = 0;
  for (int bit = 30; bit >= 0; --bit) {
    const int candidate = smallest | 1 << bit;
    const int count = num_not_below(shared, block.length, candidate, bit);
    if (count >= block.kept) {
      smallest = candidate;
    }
    if (count == block.kept) {
      break;
    }
  }
  return smallest;
}

__device__ __forceinline__ int num_before(const unsigned int* words, int word) {
  int count = 0;
  for (int i = 0; i < word; ++i) {
    count += __popc(words[i]);
  }
  return count;
}

// Writes shared.indices.
__device__ __forceinline__ void select(Shared& shared, const SparseBlock& block) {
  const int smallest = smallest_kept(shared, block);
  const int num_words = static_cast<int>((block.length + kWordBits - 1) / kWordBits);
  const long long whole_rounds = (block.length + kThreads - 1) / kThreads * kThreads;
  for_each(whole_rounds, [&](int i) {
    const int magnitude = i < block.length ? magnitude_of(shared.values[i]) : -1;
    const unsigned int larger = __ballot_sync(kAllLanes, magnitude > smallest);
    const unsigned int equal = __ballot_sync(kAllLanes, magnitude == smallest);
    if (i % kWordBits == 0 && i < block.length) {
      shared.larger[i / kWordBits] = larger;
      shared.equal[i / kWordBits] = equal;
    }
  });
  __syncthreads();
  const int num_larger = num_before(shared.larger, num_words);
  for_each(num_words, [&](int word) {
    int room = static_cast<int>(block.kept) - num_larger - num_before(shared.equal, word);
    unsigned int kept = shared.larger[word];
    for (unsigned int rest = shared.equal[word]; rest != 0 && room > 0; rest &= rest - 1, --room) {
      kept |= rest & (0u - rest);  // the lowest bit
    }
    shared.kept[word] = kept;
  });
  __syncthreads();
  for_each(num_words, [&](int word) {
    int place = num_before(shared.kept, word);
    for (unsigned int rest = shared.kept[word]; rest != 0; rest &= rest - 1) {
      const unsigned int below = (rest & (0u - rest)) - 1;
      shared.indices[place++] = static_cast<unsigned short>(word * kWordBits + __popc(below));
    }
  });
  __syncthreads();
}

// The largest magnitude of shared.values.
__device__ __forceinline__ float largest_of(Shared& shared, const SparseBlock& block) {
  int largest = 0;
  for_each(block.kept, [&](int i) {
    const int magnitude = magnitude_of(shared.values[shared.indices[i]]);
    largest = magnitude > largest ? magnitude : largest;
  });
#pragma unroll
  for (int lane = kWarpThreads / 2; lane > 0; lane /= 2) {
    const int other = __shfl_xor_sync(kAllLanes, largest, lane);
    largest = other > largest ? other : largest;
  }
  if (threadIdx.x % kWarpThreads == 0) {
    shared.counts[0][threadIdx.x / kWarpThreads] = largest;
  }
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    largest = shared.counts[0][warp] > largest ? shared.counts[0][warp] : largest;
  }
  return float_of(static_cast<unsigned int>(largest));
}

// Writes what is kept of shared.values, and returns how it is coded. All threads have written their values.
__device__ __forceinline__ ValueCoder encode_block(Shared& shared, const SparseBlock& block, unsigned char* wire) {
  __syncthreads();
  select(shared, block);
  const ValueCoder coder = make_value_coder(largest_of(shared, block));
  if (threadIdx.x < kSparseHeaderBytes) {  // byte by byte, as a wire may begin anywhere
    wire[block.header + threadIdx.x] = static_cast<unsigned char>(bits_of(coder.largest) >> (8 * threadIdx.x));
  }
  unsigned char* payload = wire + block.payload;
  const long long num_index_bytes = index_bytes(block);
  const int bits = index_bits(block.length);
  const bool is_good = is_usable(coder);
  for_each(num_index_bytes, [&](int byte) {
    const unsigned char value = index_byte(byte, block.kept, bits, [&](long long i) { return shared.indices[i]; });
    payload[byte] = is_good ? value : 0;
  });
  for_each(block.kept, [&](int i) {
    const unsigned char code = is_good ? code_of(coder, shared.values[shared.indices[i]]) : 0;
    payload[num_index_bytes + i] = code;
  });
  return coder;
}

// Calls `put(index, value)` for the kept elements of a block in a wire, each by some thread. Not where the bytes are
// none that an encoder may write. `prepare` is told whether they are before that, on all threads.
template <typename Prepare, typename Put>
__device__ __forceinline__ void decode_block(Shared& shared, const SparseBlock& block, const unsigned char* wire,
                                             const Prepare& prepare, const Put& put) {
  unsigned int header = 0;
  for (int i = 0; i < kSparseHeaderBytes; ++i) {
    header |= static_cast<unsigned int>(wire[block.header + i]) << (8 * i);
  }
  const ValueCoder coder = make_value_coder(float_of(header));
  const unsigned char* payload = wire + block.payload;
  const int bits = index_bits(block.length);
  __syncthreads();  // all have read what was found of the wire before
  if (threadIdx.x == 0) {
    shared.is_spoiled = !is_usable(coder);
  }
  __syncthreads();
  for_each(block.kept, [&](int i) {
    const int index = read_index(payload, i, bits);
    if (index >= block.length || (i > 0 && index <= read_index(payload, i - 1, bits))) {
      shared.is_spoiled = true;
    }
  });
  __syncthreads();
  const bool is_good = !shared.is_spoiled;
  prepare(is_good);
  __syncthreads();
  if (is_good) {
    const unsigned char* codes = payload + index_bytes(block);
    for_each(block.kept, [&](int i) { put(read_index(payload, i, bits), value_of(coder, codes[i])); });
  }
}

// Forms the mean of a block in shared.values, summed in row order.
__device__ __forceinline__ void form_mean(Shared& shared, const SparseBlock& block, const Rows& rows, float divisor) {
  for_each(block.length, [&](int i) { shared.values[i] = 0.0f; });
  bool are_good = true;
  for (long long row = 0; row < rows.num_rows; ++row) {
    decode_block(
        shared, block, rows.data + row * rows.row_bytes, [&](bool is_good) { are_good = are_good && is_good; },
        [&](int index, float value) { shared.values[index] += value; });
  }
  __syncthreads();
  for_each(block.length, [&](int i) { shared.values[i] = are_good ? shared.values[i] / divisor : not_a_number(); });
}

// Calls `body(block)` for every block of the table.
template <typename Body>
__device__ __forceinline__ void for_each_block(const Table& table, long long num_elements, long long wire_bytes,
                                               const Body& body) {
  for (long long b = blockIdx.x; b < table.num_blocks; b += gridDim.x) {
    const SparseBlock block = sparse_block(table, b);
    if (!is_inside(block, num_elements, wire_bytes)) {
      __trap();
    }
    __syncthreads();  // all are done with the block before
    body(block);
  }
}

template <typename T>
__device__ __forceinline__ void encode_all(Shared& shared, Span<const T> x, Table table, Span<unsigned char> wire) {
  for_each_block(table, x.size, wire.size, [&](const SparseBlock& block) {
    for_each(block.length, [&](int i) { shared.values[i] = to_float(x.data[block.start + i]); });
    encode_block(shared, block, wire.data);
  });
}

template <typename T>
__device__ __forceinline__ void decode_all(Shared& shared, Span<const unsigned char> wire, Table table, Span<T> x) {
  for_each_block(table, x.size, wire.size, [&](const SparseBlock& block) {
    T* values = x.data + block.start;
    decode_block(
        shared, block, wire.data,
        [&](bool is_good) {
          for_each(block.length, [&](int i) { from_float(is_good ? 0.0f : not_a_number(), values[i]); });
        },
        [&](int index, float value) { from_float(value, values[index]); });
  });
}

}  // namespace topk

#define TORCHBAGUA_TOPK_KERNEL extern "C" __global__ void __launch_bounds__(kThreads)

TORCHBAGUA_TOPK_KERNEL torchbagua_topk_encode_float32(Span<const float> x, Table table, Span<unsigned char> wire) {
  __shared__ topk::Shared shared;
  topk::encode_all(shared, x, table, wire);
}

TORCHBAGUA_TOPK_KERNEL torchbagua_topk_encode_bfloat16(Span<const BFloat16> x, Table table, Span<unsigned char> wire) {
  __shared__ topk::Shared shared;
  topk::encode_all(shared, x, table, wire);
}

TORCHBAGUA_TOPK_KERNEL torchbagua_topk_encode_float16(Span<const Float16> x, Table table, Span<unsigned char> wire) {
  __shared__ topk::Shared shared;
  topk::encode_all(shared, x, table, wire);
}

TORCHBAGUA_TOPK_KERNEL torchbagua_topk_decode_float32(Span<const unsigned char> wire, Table table, Span<float> x) {
  __shared__ topk::Shared shared;
  topk::decode_all(shared, wire, table, x);
}

TORCHBAGUA_TOPK_KERNEL torchbagua_topk_decode_bfloat16(Span<const unsigned char> wire, Table table, Span<BFloat16> x) {
  __shared__ topk::Shared shared;
  topk::decode_all(shared, wire, table, x);
}

TORCHBAGUA_TOPK_KERNEL torchbagua_topk_decode_float16(Span<const unsigned char> wire, Table table, Span<Float16> x) {
  __shared__ topk::Shared shared;
  topk::decode_all(shared, wire, table, x);
}

TORCHBAGUA_TOPK_KERNEL torchbagua_topk_decode_mean_float32(Rows rows, Table table, float divisor, Span<float> x) {
  __shared__ topk::Shared shared;
  topk::for_each_block(table, x.size, rows.row_bytes, [&](const SparseBlock& block) {
    topk::form_mean(shared, block, rows, divisor);
    topk::for_each(block.length, [&](int i) { x.data[block.start + i] = shared.values[i]; });
  });
}

TORCHBAGUA_TOPK_KERNEL torchbagua_topk_decode_mean_encode(Rows rows, Table table, float divisor,
                                                          Span<unsigned char> wire) {
  __shared__ topk::Shared shared;
  topk::for_each_block(table, kAnyStart, wire.size, [&](const SparseBlock& block) {
    topk::form_mean(shared, block, rows, divisor);
    topk::encode_block(shared, block, wire.data);
  });
}

TORCHBAGUA_TOPK_KERNEL torchbagua_topk_encode_feedback_float32(Span<const float> x, Span<const float> residual,
                                                               Table table, Span<unsigned char> wire,
                                                               Span<float> left_out) {
  __shared__ topk::Shared shared;
  topk::for_each_block(table, x.size, wire.size, [&](const SparseBlock& block) {
    topk::for_each(block.length,
                   [&](int i) { shared.values[i] = x.data[block.start + i] + residual.data[block.start + i]; });
    const ValueCoder coder = topk::encode_block(shared, block, wire.data);
    const bool is_good = is_usable(coder);
    topk::for_each(is_good ? block.kept : 0, [&](int i) {
      float& value = shared.values[shared.indices[i]];
      value -= value_of(coder, code_of(coder, value));
    });
    __syncthreads();
    topk::for_each(block.length,
                   [&](int i) { left_out.data[block.start + i] = is_good ? shared.values[i] : not_a_number(); });
  });
}

#undef TORCHBAGUA_TOPK_KERNEL

TORCHBAGUA_CUDA_CODEC_OF_FIELDS(topk, 1, 5)

}  // namespace torchbagua::cuda
