// The sparse codecs on CUDA. A thread block processes one block of the table after the other and stores its values in
// shared memory. No result depends on the order in which threads run.
#pragma once

#include "../element/sparse.h"
#include "blocks.cuh"

namespace torchbagua::cuda {
namespace sparse {

constexpr int kWordBits = 32;
constexpr int kWords = kLongestSparseBlock / kWordBits;

static_assert(kThreads % kWarpThreads == 0 && kWordBits == kWarpThreads, "a warp's lanes are the bits of a word");

// The shared memory of the threads for one block. Each bit of a word is an element. Only TopK uses the words, and only
// BlockK uses the sums and runs.
struct Shared {
  float values[kLongestSparseBlock];
  unsigned short indices[kLongestSparseBlock];  // of the elements that are sent, ascending
  unsigned int larger[kWords];                  // than the threshold of the magnitudes to send
  unsigned int equal[kWords];                   // to that threshold
  unsigned int kept[kWords];
  double sums[kThreads];  // the largest sum that each thread has found
  int runs[kThreads];     // and its run
  int counts[2][kWarps];
  bool is_spoiled;
};

// Calls `body(i)` for numbers below `count`, distributed over the threads. All threads of a warp call it equally often
// if `count` is a multiple of kThreads.
template <typename Body>
__device__ __forceinline__ void for_each(long long count, const Body& body) {
  for (long long i = threadIdx.x; i < count; i += kThreads) {
    body(static_cast<int>(i));
  }
}

// The sum, or the maximum, over all threads; the parity of `turn` alternates from call to call.
template <typename Join>
__device__ __forceinline__ int joined_over_threads(Shared& shared, int own, int turn, const Join& join) {
#pragma unroll
  for (int lane = kWarpThreads / 2; lane > 0; lane /= 2) {
    own = join(own, static_cast<int>(__shfl_xor_sync(kAllLanes, own, lane)));
  }
  if (threadIdx.x % kWarpThreads == 0) {
    shared.counts[turn & 1][threadIdx.x / kWarpThreads] = own;
  }
  __syncthreads();
  int joined = shared.counts[turn & 1][0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) {
    joined = join(joined, shared.counts[turn & 1][warp]);
  }
  return joined;
}

// The largest magnitude of the elements `at(i)` of shared.values, for i below `count`.
template <typename At>
__device__ __forceinline__ int largest_of(Shared& shared, long long count, int turn, const At& at) {
  int largest = 0;
  for_each(count, [&](int i) {
    const int magnitude = magnitude_of(shared.values[at(i)]);
    largest = magnitude > largest ? magnitude : largest;
  });
  return joined_over_threads(shared, largest, turn, [](int a, int b) { return a > b ? a : b; });
}

// `Choice` selects the elements to send. It has Format, and
// - select, which finds the indices and returns the largest magnitude that is sent; or, if a magnitude in the block
//   cannot be encoded, that magnitude;
// - index_byte_at, which returns a byte of the indices for a payload, once they are found;
// - read_indices, which reads the indices from a payload, and sets is_spoiled if no encoder writes them.
// All threads call these functions. When select and read_indices return, all threads have written their results.

// Encodes shared.values and returns the coder of the values. All threads must have written their values.
template <typename Choice>
__device__ __forceinline__ ValueCoder encode_block(Shared& shared, const SparseBlock& block, unsigned char* wire) {
  __syncthreads();
  const ValueCoder coder = make_value_coder(float_of(static_cast<unsigned int>(Choice::select(shared, block))));
  if (threadIdx.x < kSparseHeaderBytes) {  // byte by byte, since a wire can have any alignment
    wire[block.header + threadIdx.x] = static_cast<unsigned char>(bits_of(coder.largest) >> (8 * threadIdx.x));
  }
  unsigned char* payload = wire + block.payload;
  const long long num_index_bytes = Choice::Format::index_bytes(block);
  const bool is_good = is_usable(coder);
  for_each(num_index_bytes, [&](int byte) {
    const unsigned char value = Choice::index_byte_at(shared, block, byte);
    payload[byte] = is_good ? value : 0;
  });
  for_each(block.kept, [&](int i) {
    const unsigned char code = is_good ? code_of(coder, shared.values[shared.indices[i]]) : 0;
    payload[num_index_bytes + i] = code;
  });
  return coder;
}

// Calls `put(index, value)` for the sent elements of a block in a wire, each on some thread; not if no encoder can have
// written the bytes. Before that, calls `prepare` on all threads, with whether an encoder can have written them.
template <typename Choice, typename Prepare, typename Put>
__device__ __forceinline__ void decode_block(Shared& shared, const SparseBlock& block, const unsigned char* wire,
                                             const Prepare& prepare, const Put& put) {
  const ValueCoder coder = make_value_coder(float_of(read_word(wire + block.header)));
  const unsigned char* payload = wire + block.payload;
  __syncthreads();  // all threads have read the results of the previous wire
  if (threadIdx.x == 0) {
    shared.is_spoiled = !is_usable(coder);
  }
  __syncthreads();
  Choice::read_indices(shared, block, payload);
  const bool is_good = !shared.is_spoiled;
  prepare(is_good);
  __syncthreads();
  if (is_good) {
    const unsigned char* codes = payload + Choice::Format::index_bytes(block);
    for_each(block.kept, [&](int i) { put(shared.indices[i], value_of(coder, codes[i])); });
  }
}

// Computes the mean of a block in shared.values, summed in row order.
template <typename Choice>
__device__ __forceinline__ void form_mean(Shared& shared, const SparseBlock& block, const Rows& rows, float divisor) {
  for_each(block.length, [&](int i) { shared.values[i] = 0.0f; });
  bool are_good = true;
  for (long long row = 0; row < rows.num_rows; ++row) {
    decode_block<Choice>(
        shared, block, rows.data + row * rows.row_bytes, [&](bool is_good) { are_good = are_good && is_good; },
        [&](int index, float value) { shared.values[index] += value; });
  }
  __syncthreads();
  for_each(block.length, [&](int i) { shared.values[i] = are_good ? shared.values[i] / divisor : not_a_number(); });
}

// Calls `body(block)` for every block of the table.
template <typename Format, typename Body>
__device__ __forceinline__ void for_each_row(const Table& table, long long num_elements, long long wire_bytes,
                                             const Body& body) {
  for (long long b = blockIdx.x; b < table.num_blocks; b += gridDim.x) {
    const SparseBlock block = sparse_block_of(table, b);
    if (!is_row_inside<Format>(block, num_elements, wire_bytes)) {
      __trap();
    }
    __syncthreads();  // all threads have finished the previous block
    body(block);
  }
}

template <typename Choice, typename T>
__device__ __forceinline__ void encode(Shared& shared, Span<const T> x, Table table, Span<unsigned char> wire) {
  for_each_row<typename Choice::Format>(table, x.size, wire.size, [&](const SparseBlock& block) {
    for_each(block.length, [&](int i) { shared.values[i] = to_float(x.data[block.start + i]); });
    encode_block<Choice>(shared, block, wire.data);
  });
}

template <typename Choice, typename T>
__device__ __forceinline__ void decode(Shared& shared, Span<const unsigned char> wire, Table table, Span<T> x) {
  for_each_row<typename Choice::Format>(table, x.size, wire.size, [&](const SparseBlock& block) {
    T* values = x.data + block.start;
    decode_block<Choice>(
        shared, block, wire.data,
        [&](bool is_good) {
          for_each(block.length, [&](int i) { from_float(is_good ? 0.0f : not_a_number(), values[i]); });
        },
        [&](int index, float value) { from_float(value, values[index]); });
  });
}

template <typename Choice>
__device__ __forceinline__ void decode_mean(Shared& shared, Rows rows, Table table, float divisor, Span<float> x) {
  for_each_row<typename Choice::Format>(table, x.size, rows.row_bytes, [&](const SparseBlock& block) {
    form_mean<Choice>(shared, block, rows, divisor);
    for_each(block.length, [&](int i) { x.data[block.start + i] = shared.values[i]; });
  });
}

template <typename Choice>
__device__ __forceinline__ void decode_mean_encode(Shared& shared, Rows rows, Table table, float divisor,
                                                   Span<unsigned char> wire) {
  for_each_row<typename Choice::Format>(table, kAnyStart, wire.size, [&](const SparseBlock& block) {
    form_mean<Choice>(shared, block, rows, divisor);
    encode_block<Choice>(shared, block, wire.data);
  });
}

template <typename Choice>
__device__ __forceinline__ void encode_feedback(Shared& shared, Span<const float> x, Span<const float> residual,
                                                Table table, Span<unsigned char> wire, Span<float> left_out) {
  for_each_row<typename Choice::Format>(table, x.size, wire.size, [&](const SparseBlock& block) {
    for_each(block.length, [&](int i) { shared.values[i] = x.data[block.start + i] + residual.data[block.start + i]; });
    const ValueCoder coder = encode_block<Choice>(shared, block, wire.data);
    const bool is_good = is_usable(coder);
    for_each(is_good ? block.kept : 0, [&](int i) {
      float& value = shared.values[shared.indices[i]];
      value -= value_of(coder, code_of(coder, value));
    });
    __syncthreads();
    for_each(block.length,
             [&](int i) { left_out.data[block.start + i] = is_good ? shared.values[i] : not_a_number(); });
  });
}

}  // namespace sparse
}  // namespace torchbagua::cuda

// The kernels of a codec, like those of TORCHBAGUA_MINMAX_KERNELS.
#define TORCHBAGUA_SPARSE_KERNEL extern "C" __global__ void __launch_bounds__(kThreads)
#define TORCHBAGUA_SPARSE_KERNELS(codec, Choice)                                                                      \
  TORCHBAGUA_SPARSE_KERNEL torchbagua_##codec##_encode_float32(Span<const float> x, Table table,                      \
                                                               Span<unsigned char> wire) {                            \
    __shared__ sparse::Shared shared;                                                                                 \
    sparse::encode<Choice>(shared, x, table, wire);                                                                   \
  }                                                                                                                   \
  TORCHBAGUA_SPARSE_KERNEL torchbagua_##codec##_encode_bfloat16(Span<const BFloat16> x, Table table,                  \
                                                                Span<unsigned char> wire) {                           \
    __shared__ sparse::Shared shared;                                                                                 \
    sparse::encode<Choice>(shared, x, table, wire);                                                                   \
  }                                                                                                                   \
  TORCHBAGUA_SPARSE_KERNEL torchbagua_##codec##_encode_float16(Span<const Float16> x, Table table,                    \
                                                               Span<unsigned char> wire) {                            \
    __shared__ sparse::Shared shared;                                                                                 \
    sparse::encode<Choice>(shared, x, table, wire);                                                                   \
  }                                                                                                                   \
  TORCHBAGUA_SPARSE_KERNEL torchbagua_##codec##_decode_float32(Span<const unsigned char> wire, Table table,           \
                                                               Span<float> x) {                                       \
    __shared__ sparse::Shared shared;                                                                                 \
    sparse::decode<Choice>(shared, wire, table, x);                                                                   \
  }                                                                                                                   \
  TORCHBAGUA_SPARSE_KERNEL torchbagua_##codec##_decode_bfloat16(Span<const unsigned char> wire, Table table,          \
                                                                Span<BFloat16> x) {                                   \
    __shared__ sparse::Shared shared;                                                                                 \
    sparse::decode<Choice>(shared, wire, table, x);                                                                   \
  }                                                                                                                   \
  TORCHBAGUA_SPARSE_KERNEL torchbagua_##codec##_decode_float16(Span<const unsigned char> wire, Table table,           \
                                                               Span<Float16> x) {                                     \
    __shared__ sparse::Shared shared;                                                                                 \
    sparse::decode<Choice>(shared, wire, table, x);                                                                   \
  }                                                                                                                   \
  TORCHBAGUA_SPARSE_KERNEL torchbagua_##codec##_decode_mean_float32(Rows rows, Table table, float divisor,            \
                                                                    Span<float> x) {                                  \
    __shared__ sparse::Shared shared;                                                                                 \
    sparse::decode_mean<Choice>(shared, rows, table, divisor, x);                                                     \
  }                                                                                                                   \
  TORCHBAGUA_SPARSE_KERNEL torchbagua_##codec##_decode_mean_encode(Rows rows, Table table, float divisor,             \
                                                                   Span<unsigned char> wire) {                        \
    __shared__ sparse::Shared shared;                                                                                 \
    sparse::decode_mean_encode<Choice>(shared, rows, table, divisor, wire);                                           \
  }                                                                                                                   \
  TORCHBAGUA_SPARSE_KERNEL torchbagua_##codec##_encode_feedback_float32(                                              \
      Span<const float> x, Span<const float> residual, Table table, Span<unsigned char> wire, Span<float> left_out) { \
    __shared__ sparse::Shared shared;                                                                                 \
    sparse::encode_feedback<Choice>(shared, x, residual, table, wire, left_out);                                      \
  }                                                                                                                   \
  TORCHBAGUA_CUDA_CODEC_OF_FIELDS(codec, 1, sizeof(SparseBlock) / sizeof(long long))
