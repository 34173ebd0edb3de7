// The loops of tests/own_codec/largest.py over blocks, as somebody else would add them: csrc_cuda/cpu/largest.cpp.
#include "codec.h"

namespace torchbagua::cpu {

struct Largest {
  static constexpr const char* kName = "largest";
  static constexpr long long kHeaderBytes = 0;

  static long long payload_bytes(long long) { return 8; }

  // What a payload holds.
  struct Element {
    int index;
    float value;
  };

  static TORCHBAGUA_ELEMENT Element read(const uint8_t* payload, long long length) {
    Element element;
    std::memcpy(&element, payload, sizeof(Element));
    const bool is_inside = element.index >= 0 && element.index < length;
    return is_inside ? element : Element{0, not_a_number()};
  }

  template <typename T>
  static TORCHBAGUA_ELEMENT void encode(const T* x, const Table& table, uint8_t* wire) {
    for (long long b = 0; b < table.num_blocks; ++b) {
      const Block& block = table.blocks[b];
      Element largest{0, to_float(x[block.start])};
      for (long long i = 1; i < block.length; ++i) {
        const float value = to_float(x[block.start + i]);
        if (magnitude_of(value) > magnitude_of(largest.value)) {
          largest = Element{static_cast<int>(i), value};
        }
      }
      std::memcpy(wire + block.payload, &largest, sizeof(Element));
    }
  }

  template <typename T>
  static TORCHBAGUA_ELEMENT void decode(const uint8_t* wire, const Table& table, T* x) {
    for (long long b = 0; b < table.num_blocks; ++b) {
      const Block& block = table.blocks[b];
      for (long long i = 0; i < block.length; ++i) {
        from_float(0.0f, x[block.start + i]);
      }
      const Element element = read(wire + block.payload, block.length);
      from_float(element.value, x[block.start + element.index]);
    }
  }

  // The mean of one block, to `mean`.
  static TORCHBAGUA_ELEMENT void mean_of(const Rows& rows, const Block& block, float divisor, float* mean) {
    for (long long i = 0; i < block.length; ++i) {
      mean[i] = 0.0f;
    }
    for (long long row = 0; row < rows.num_rows; ++row) {
      const Element element = read(rows.data + row * rows.row_bytes + block.payload, block.length);
      mean[element.index] += element.value;
    }
    for (long long i = 0; i < block.length; ++i) {
      mean[i] /= divisor;
    }
  }

  static TORCHBAGUA_ELEMENT void decode_mean(const Rows& rows, const Table& table, float divisor, float* x) {
    for (long long b = 0; b < table.num_blocks; ++b) {
      mean_of(rows, table.blocks[b], divisor, x + table.blocks[b].start);
    }
  }

  static void decode_mean_encode(const Rows& rows, const Table& table, float divisor, uint8_t* wire) {
    for (long long b = 0; b < table.num_blocks; ++b) {
      Block block = table.blocks[b];
      std::vector<float> mean(block.length);
      mean_of(rows, block, divisor, mean.data());
      block.start = 0;
      encode(mean.data(), Table{&block, 1, table.num_fields}, wire);
    }
  }

  static TORCHBAGUA_ELEMENT void encode_feedback(const float* x, const float* residual, const Table& table,
                                                 uint8_t* wire, float* left_out) {
    for (long long b = 0; b < table.num_blocks; ++b) {
      const Block& block = table.blocks[b];
      for (long long i = block.start; i < block.start + block.length; ++i) {
        left_out[i] = x[i] + residual[i];
      }
      encode_sum(block, wire, left_out);
    }
  }

  // Of a block whose sum is in left_out.
  static TORCHBAGUA_ELEMENT void encode_sum(const Block& block, uint8_t* wire, float* left_out) {
    encode(left_out, Table{&block, 1, 4}, wire);
    const Element element = read(wire + block.payload, block.length);
    left_out[block.start + element.index] -= element.value;
  }

  static TORCHBAGUA_ELEMENT void decode_mean_encode_feedback(const Rows& rows, const Table& table, float divisor,
                                                             const float* residual, uint8_t* wire, float* left_out) {
    for (long long b = 0; b < table.num_blocks; ++b) {
      const Block& block = table.blocks[b];
      mean_of(rows, block, divisor, left_out + block.start);
      for (long long i = block.start; i < block.start + block.length; ++i) {
        left_out[i] += residual[i];
      }
      encode_sum(block, wire, left_out);
    }
  }
};

TORCHBAGUA_CPU_CODEC(Largest)

}  // namespace torchbagua::cpu
