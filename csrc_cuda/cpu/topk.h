// The loops of TopK over blocks.
#pragma once

#include <algorithm>

#include "codec.h"
#include "element/topk.h"

namespace torchbagua::cpu {

static_assert(kLongestSparseBlock <= kTile, "what is worked out of a block stays in the L1 cache");

struct TopK {
  static constexpr const char* kName = "topk";
  static constexpr long long kFields = 5;

  static TORCHBAGUA_ELEMENT bool is_inside_of(const Table& table, long long b, long long num_elements,
                                              long long wire_bytes) {
    return is_inside(sparse_block(table, b), num_elements, wire_bytes);
  }

  static std::string allowed_rows() {
    return binding::text_of("rows (start, length from 1 to ", kLongestSparseBlock,
                            ", header at a multiple of 4, payload, kept from 1 to length)");
  }

  // What is worked out of a block.
  struct Kept {
    alignas(64) int magnitudes[kLongestSparseBlock];
    alignas(64) int indices[kLongestSparseBlock];  // of what is kept, ascending
  };

  static TORCHBAGUA_ELEMENT int num_not_below(const int* magnitudes, long long length, int least) {
    int count = 0;
#pragma omp simd reduction(+ : count)
    for (long long i = 0; i < length; ++i) {
      count += magnitudes[i] >= least;
    }
    return count;
  }

  // Finds what is kept, and returns the largest magnitude. The smallest one that is kept is found bit by bit, from the
  // highest: a bit is set where enough magnitudes are no smaller. To count them all again is faster than to sort some.
  template <typename T>
  static TORCHBAGUA_ELEMENT float select(const T* x, long long length, long long kept, Kept& found) {
    int* const magnitudes = found.magnitudes;
    int largest = 0;
#pragma omp simd reduction(max : largest)
    for (long long i = 0; i < length; ++i) {
      magnitudes[i] = magnitude_of(to_float(x[i]));
      largest = largest < magnitudes[i] ? magnitudes[i] : largest;
    }
    if (largest >= kUnusableMagnitude) {
      return float_of(static_cast<unsigned int>(largest));  // nothing is kept of it
    }
    int smallest = 0;
    for (int bit = 30; bit >= 0; --bit) {
      const int candidate = smallest | 1 << bit;
      const int count = candidate <= largest ? num_not_below(magnitudes, length, candidate) : 0;
      if (count >= kept) {
        smallest = candidate;
      }
      if (count == kept) {
        break;
      }
    }
    // Of equal magnitudes as many are kept, the first of them, as the larger ones leave room for.
    long long room = kept - num_not_below(magnitudes, length, smallest + 1);
    long long written = 0;
    const auto add = [&](long long i) TORCHBAGUA_INLINED {
      const bool is_larger = magnitudes[i] > smallest;
      if (is_larger || room > 0) {
        found.indices[written++] = static_cast<int>(i);
        room -= !is_larger;
      }
    };
    long long first = 0;
    for (; first + kLanes <= length; first += kLanes) {
      unsigned int any = 0;
#pragma omp simd reduction(| : any)
      for (long long lane = 0; lane < kLanes; ++lane) {
        any |= static_cast<unsigned int>(magnitudes[first + lane] >= smallest) << lane;
      }
      for (; any != 0; any &= any - 1) {
        add(first + lowest_bit(any));
      }
    }
    for (; first < length; ++first) {
      if (magnitudes[first] >= smallest) {
        add(first);
      }
    }
    return float_of(static_cast<unsigned int>(largest));
  }

  static TORCHBAGUA_ELEMENT int lowest_bit(unsigned int bits) {
#if defined(__GNUC__)
    return __builtin_ctz(bits);
#else
    int bit = 0;
    while ((bits >> bit & 1) == 0) {
      ++bit;
    }
    return bit;
#endif
  }

  // Writes a block whose elements begin at `x`, and returns how its values are coded.
  template <typename T>
  static TORCHBAGUA_ELEMENT ValueCoder encode_block(const T* x, const SparseBlock& block, Kept& found, uint8_t* wire) {
    const ValueCoder coder = make_value_coder(select(x, block.length, block.kept, found));
    write_header(wire + block.header, coder.largest);
    uint8_t* payload = wire + block.payload;
    if (!is_usable(coder)) {
      std::memset(payload, 0, payload_bytes(block));
      return coder;
    }
    const int bits = index_bits(block.length);
    uint64_t stream = 0;
    int num_bits = 0;
    for (long long i = 0; i < block.kept; ++i) {
      stream |= static_cast<uint64_t>(found.indices[i]) << num_bits;
      for (num_bits += bits; num_bits >= 8; num_bits -= 8, stream >>= 8) {
        *payload++ = static_cast<uint8_t>(stream);
      }
    }
    if (num_bits > 0) {
      *payload++ = static_cast<uint8_t>(stream);
    }
    for (long long i = 0; i < block.kept; ++i) {
      payload[i] = code_of(coder, to_float(x[found.indices[i]]));
    }
    return coder;
  }

  // Calls `put(index, value)` for the kept elements of a block, and returns whether its bytes are ones that an encoder
  // may write; calls nothing where they are not.
  template <typename Put>
  static TORCHBAGUA_ELEMENT bool decode_block(const uint8_t* wire, const SparseBlock& block, Kept& found,
                                              const Put& put) {
    const ValueCoder coder = make_value_coder(read_header<float>(wire + block.header));
    const uint8_t* payload = wire + block.payload;
    const int bits = index_bits(block.length);
    bool is_good = is_usable(coder);
    int before = -1;
    for (long long i = 0; i < block.kept; ++i) {
      found.indices[i] = read_index(payload, i, bits);
      is_good = is_good && found.indices[i] > before;
      before = found.indices[i];
    }
    if (!is_good || before >= block.length) {
      return false;
    }
    const uint8_t* codes = payload + index_bytes(block);
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
      const SparseBlock& block = sparse_block(table, b);
      encode_block(x + block.start, block, found, wire);
    }
  }

  template <typename T>
  static TORCHBAGUA_ELEMENT void decode(const uint8_t* wire, const Table& table, T* x) {
    Kept found;
    for (long long b = 0; b < table.num_blocks; ++b) {
      const SparseBlock& block = sparse_block(table, b);
      T* values = x + block.start;
      fill(values, block.length, 0.0f);
      if (!decode_block(wire, block, found,
                        [=](int index, float value) TORCHBAGUA_INLINED { from_float(value, values[index]); })) {
        fill(values, block.length, not_a_number());
      }
    }
  }

  // The mean of a block, summed in row order, to `mean`.
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
      const SparseBlock& block = sparse_block(table, b);
      mean_of(rows, block, divisor, found, x + block.start);
    }
  }

  static TORCHBAGUA_ELEMENT void decode_mean_encode(const Rows& rows, const Table& table, float divisor,
                                                    uint8_t* wire) {
    Kept found;
    alignas(64) float mean[kLongestSparseBlock];
    for (long long b = 0; b < table.num_blocks; ++b) {
      const SparseBlock& block = sparse_block(table, b);
      mean_of(rows, block, divisor, found, mean);
      encode_block(mean, block, found, wire);
    }
  }

  static TORCHBAGUA_ELEMENT void encode_feedback(const float* x, const float* residual, const Table& table,
                                                 uint8_t* wire, float* left_out) {
    Kept found;
    for (long long b = 0; b < table.num_blocks; ++b) {
      const SparseBlock& block = sparse_block(table, b);
      const float* values = x + block.start;
      const float* left_before = residual + block.start;
      float* sum = left_out + block.start;
#pragma omp simd
      for (long long i = 0; i < block.length; ++i) {
        sum[i] = values[i] + left_before[i];
      }
      const ValueCoder coder = encode_block(sum, block, found, wire);
      if (!is_usable(coder)) {
        fill(sum, block.length, not_a_number());
        continue;
      }
      for (long long i = 0; i < block.kept; ++i) {
        float& value = sum[found.indices[i]];
        value -= value_of(coder, code_of(coder, value));
      }
    }
  }
};

TORCHBAGUA_CPU_CODEC(TopK)

}  // namespace torchbagua::cpu
