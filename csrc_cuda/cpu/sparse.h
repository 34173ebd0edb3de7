// The loops of the sparse codecs over blocks.
#pragma once

#include <algorithm>

#include "codec.h"
#include "element/sparse.h"

namespace torchbagua::cpu {

static_assert(kLongestSparseBlock <= kTile, "the intermediate results of a block stay in the L1 cache");

// The intermediate results of a block.
struct Kept {
  alignas(64) int magnitudes[kLongestSparseBlock];
  alignas(64) int indices[kLongestSparseBlock];  // of the elements that are sent, ascending
};

// The largest magnitude, as an integer; see magnitude_of.
template <typename T>
TORCHBAGUA_ELEMENT int largest_magnitude(const T* x, long long length) {
  int largest = 0;
#pragma omp simd reduction(max : largest)
  for (long long i = 0; i < length; ++i) {
    const int magnitude = magnitude_of(to_float(x[i]));
    largest = largest < magnitude ? magnitude : largest;
  }
  return largest;
}

// `Choice` selects the elements to send. It has Format; kName, the prefix of the operations' names; and
// - select, which finds the indices and returns the largest magnitude that is sent; or, if a magnitude in the block
//   cannot be encoded, finds nothing and returns that magnitude;
// - write_indices and read_indices, for the indices in a payload; the latter returns whether an encoder writes them.
template <typename Choice>
struct SparseCodec {
  using Format = typename Choice::Format;

  static constexpr const char* kName = Choice::kName;
  static constexpr long long kFields = sizeof(SparseBlock) / sizeof(long long);

  static TORCHBAGUA_ELEMENT bool is_inside_of(const Table& table, long long b, long long num_elements,
                                              long long wire_bytes) {
    return is_row_inside<Format>(sparse_block_of(table, b), num_elements, wire_bytes);
  }

  static std::string allowed_rows() {
    return binding::text_of("rows (start, length from 1 to ", kLongestSparseBlock,
                            ", header at a multiple of 4, payload, kept from 1 to length)");
  }

  // Encodes the block that begins at `x`, and returns the coder of its values.
  template <typename T>
  static TORCHBAGUA_ELEMENT ValueCoder encode_block(const T* x, const SparseBlock& block, Kept& found, uint8_t* wire) {
    const ValueCoder coder = make_value_coder(Choice::select(x, block, found));
    write_header(wire + block.header, coder.largest);
    uint8_t* const payload = wire + block.payload;
    if (!is_usable(coder)) {
      std::memset(payload, 0, payload_bytes_of<Format>(block));
      return coder;
    }
    Choice::write_indices(found, block, payload);
    uint8_t* const codes = payload + Format::index_bytes(block);
    for (long long i = 0; i < block.kept; ++i) {
      codes[i] = code_of(coder, to_float(x[found.indices[i]]));
    }
    return coder;
  }

  // Calls `put(index, value)` for the sent elements of a block and returns true; if no encoder can have written its
  // bytes, returns false without any call.
  template <typename Put>
  static TORCHBAGUA_ELEMENT bool decode_block(const uint8_t* wire, const SparseBlock& block, Kept& found,
                                              const Put& put) {
    const ValueCoder coder = make_value_coder(read_header<float>(wire + block.header));
    const uint8_t* payload = wire + block.payload;
    if (!is_usable(coder) || !Choice::read_indices(payload, block, found)) {
      return false;
    }
    const uint8_t* codes = payload + Format::index_bytes(block);
    for (long long i = 0; i < block.kept; ++i) {
      put(found.indices[i], value_of(coder, codes[i]));
    }
    return true;
  }

  template <typename T>
  static TORCHBAGUA_ELEMENT void fill(T* x, long long length, float value) {
    T element;
    from_float(value, element);
    std::fill(x, x + length, element);
  }

  template <typename T>
  static TORCHBAGUA_ELEMENT void encode(const T* x, const Table& table, uint8_t* wire) {
    Kept found;
    for (long long b = 0; b < table.num_blocks; ++b) {
      const SparseBlock& block = sparse_block_of(table, b);
      encode_block(x + block.start, block, found, wire);
    }
  }

  template <typename T>
  static TORCHBAGUA_ELEMENT void decode(const uint8_t* wire, const Table& table, T* x) {
    Kept found;
    for (long long b = 0; b < table.num_blocks; ++b) {
      const SparseBlock& block = sparse_block_of(table, b);
      T* values = x + block.start;
      fill(values, block.length, 0.0f);
      if (!decode_block(wire, block, found,
                        [=](int index, float value) TORCHBAGUA_INLINED { from_float(value, values[index]); })) {
        fill(values, block.length, not_a_number());
      }
    }
  }

  // Writes the mean of a block, summed in row order, to `mean`.
  static TORCHBAGUA_ELEMENT void mean_of(const Rows& rows, const SparseBlock& block, float divisor, Kept& found,
                                         float* mean) {
    fill(mean, block.length, 0.0f);
    bool is_good = true;
    for (long long row = 0; row < rows.num_rows; ++row) {
      is_good &= decode_block(rows.data + row * rows.row_bytes, block, found,
                              [=](int index, float value) TORCHBAGUA_INLINED { mean[index] += value; });
    }
    if (!is_good) {
      fill(mean, block.length, not_a_number());
      return;
    }
#pragma omp simd
    for (long long i = 0; i < block.length; ++i) {
      mean[i] /= divisor;
    }
  }

  static TORCHBAGUA_ELEMENT void decode_mean(const Rows& rows, const Table& table, float divisor, float* x) {
    Kept found;
    for (long long b = 0; b < table.num_blocks; ++b) {
      const SparseBlock& block = sparse_block_of(table, b);
      mean_of(rows, block, divisor, found, x + block.start);
    }
  }

  static TORCHBAGUA_ELEMENT void decode_mean_encode(const Rows& rows, const Table& table, float divisor,
                                                    uint8_t* wire) {
    Kept found;
    alignas(64) float mean[kLongestSparseBlock];
    for (long long b = 0; b < table.num_blocks; ++b) {
      const SparseBlock& block = sparse_block_of(table, b);
      mean_of(rows, block, divisor, found, mean);
      encode_block(mean, block, found, wire);
    }
  }

  static TORCHBAGUA_ELEMENT void encode_feedback(const float* x, const float* residual, const Table& table,
                                                 uint8_t* wire, float* left_out) {
    Kept found;
    for (long long b = 0; b < table.num_blocks; ++b) {
      const SparseBlock& block = sparse_block_of(table, b);
      const float* values = x + block.start;
      const float* left_before = residual + block.start;
      float* sum = left_out + block.start;
#pragma omp simd
      for (long long i = 0; i < block.length; ++i) {
        sum[i] = values[i] + left_before[i];
      }
      encode_sum(sum, block, found, wire);
    }
  }

  // Encodes the block in `sum`, and replaces it by the new residual.
  static TORCHBAGUA_ELEMENT void encode_sum(float* sum, const SparseBlock& block, Kept& found, uint8_t* wire) {
    const ValueCoder coder = encode_block(sum, block, found, wire);
    if (!is_usable(coder)) {
      fill(sum, block.length, not_a_number());
      return;
    }
    for (long long i = 0; i < block.kept; ++i) {
      float& value = sum[found.indices[i]];
      value -= value_of(coder, code_of(coder, value));
    }
  }

  static TORCHBAGUA_ELEMENT void decode_mean_encode_feedback(const Rows& rows, const Table& table, float divisor,
                                                             const float* residual, uint8_t* wire, float* left_out) {
    Kept found;
    for (long long b = 0; b < table.num_blocks; ++b) {
      const SparseBlock& block = sparse_block_of(table, b);
      const float* left_before = residual + block.start;
      float* sum = left_out + block.start;
      mean_of(rows, block, divisor, found, sum);
#pragma omp simd
      for (long long i = 0; i < block.length; ++i) {
        sum[i] += left_before[i];
      }
      encode_sum(sum, block, found, wire);
    }
  }
};

}  // namespace torchbagua::cpu
