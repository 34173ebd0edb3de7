// The loops of TopK over blocks. The largest of each of many groups of elements give a lower bound of what is kept: of
// so many groups as there are elements to keep, each has one that is no smaller than the smallest of these. What is no
// smaller is little more than what is kept, and only that is ordered.
#pragma once

#include <algorithm>
#include <functional>

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

  // The kept elements of a block, in ascending order.
  struct Kept {
    alignas(64) int indices[kLongestSparseBlock];
    alignas(64) int magnitudes[kLongestSparseBlock];  // of the candidates
    alignas(64) int ordered[kLongestSparseBlock];
  };

  // Groups, as many as a power of two that is some times `kept` says; one for each element where that is more.
  static TORCHBAGUA_ELEMENT long long num_groups(long long length, long long kept) {
    long long groups = kLanes;
    while (groups < 3 * kept) {
      groups *= 2;
    }
    return std::min(groups, length);
  }

  // What the `kept`th largest magnitude is not below.
  template <typename T>
  static TORCHBAGUA_ELEMENT int lower_bound(const T* x, long long length, long long kept, int* largest) {
    const long long groups = num_groups(length, kept);
    if (groups == length) {
      return 0;
    }
    std::memset(largest, 0, groups * sizeof(int));
    for (long long first = 0; first < length; first += groups) {
      const long long size = std::min(groups, length - first);
#pragma omp simd
      for (long long i = 0; i < size; ++i) {
        const int magnitude = magnitude_of(to_float(x[first + i]));
        largest[i] = largest[i] < magnitude ? magnitude : largest[i];
      }
    }
    std::nth_element(largest, largest + kept - 1, largest + groups, std::greater<int>());
    return largest[kept - 1];
  }

  // Finds what is kept, and returns its largest magnitude.
  template <typename T>
  static TORCHBAGUA_ELEMENT float select(const T* x, long long length, long long kept, Kept& found) {
    const int bound = lower_bound(x, length, kept, found.ordered);
    long long count = 0;
    const auto add = [&](long long i) TORCHBAGUA_INLINED {
      found.indices[count] = static_cast<int>(i);
      found.magnitudes[count] = magnitude_of(to_float(x[i]));
      ++count;
    };
    long long first = 0;
    for (; first + kLanes <= length; first += kLanes) {
      unsigned int any = 0;
#pragma omp simd reduction(| : any)
      for (long long lane = 0; lane < kLanes; ++lane) {
        any |= static_cast<unsigned int>(magnitude_of(to_float(x[first + lane])) >= bound) << lane;
      }
      for (; any != 0; any &= any - 1) {
        add(first + lowest_bit(any));
      }
    }
    for (; first < length; ++first) {
      if (magnitude_of(to_float(x[first])) >= bound) {
        add(first);
      }
    }
    std::copy(found.magnitudes, found.magnitudes + count, found.ordered);
    std::nth_element(found.ordered, found.ordered + kept - 1, found.ordered + count, std::greater<int>());
    const int threshold = found.ordered[kept - 1];
    long long ties = kept;  // that are kept, the first of them
    int largest = 0;
    for (long long i = 0; i < count; ++i) {
      ties -= found.magnitudes[i] > threshold;
      largest = std::max(largest, found.magnitudes[i]);
    }
    long long written = 0;
    for (long long i = 0; i < count; ++i) {
      const bool is_tie = found.magnitudes[i] == threshold && ties > 0;
      ties -= is_tie;
      if (is_tie || found.magnitudes[i] > threshold) {
        found.indices[written++] = found.indices[i];
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
