// The loops of tests/own_codec/first.py over blocks, as somebody else would add them: csrc_cuda/cpu/first.cpp.
#include "codec.h"

namespace torchbagua::cpu {

struct First {
  static constexpr const char* kName = "first";
  static constexpr long long kHeaderBytes = 0;

  static long long payload_bytes(long long) { return sizeof(float); }

  static TORCHBAGUA_ELEMENT void write(float value, const Block& block, uint8_t* wire) {
    std::memcpy(wire + block.payload, &value, sizeof(float));
  }

  static TORCHBAGUA_ELEMENT float read(const uint8_t* wire, const Block& block) {
    float value;
    std::memcpy(&value, wire + block.payload, sizeof(float));
    return value;
  }

  static TORCHBAGUA_ELEMENT float mean_of(const Rows& rows, const Block& block, float divisor) {
    float total = 0.0f;
    for (long long row = 0; row < rows.num_rows; ++row) {
      total += read(rows.data + row * rows.row_bytes, block);
    }
    return total / divisor;
  }

  // Calls `body(block)` for every block of the table.
  template <typename Body>
  static TORCHBAGUA_ELEMENT void for_each_block(const Table& table, const Body& body) {
    for (long long b = 0; b < table.num_blocks; ++b) {
      body(table.blocks[b]);
    }
  }

  template <typename T>
  static TORCHBAGUA_ELEMENT void fill(float first, const Block& block, T* x) {
    for (long long i = block.start; i < block.start + block.length; ++i) {
      from_float(i == block.start ? first : 0.0f, x[i]);
    }
  }

  template <typename T>
  static TORCHBAGUA_ELEMENT void encode(const T* x, const Table& table, uint8_t* wire) {
    for_each_block(table, [=](const Block& block) { write(to_float(x[block.start]), block, wire); });
  }

  template <typename T>
  static TORCHBAGUA_ELEMENT void decode(const uint8_t* wire, const Table& table, T* x) {
    for_each_block(table, [=](const Block& block) { fill(read(wire, block), block, x); });
  }

  static TORCHBAGUA_ELEMENT void decode_mean(const Rows& rows, const Table& table, float divisor, float* x) {
    for_each_block(table, [&](const Block& block) { fill(mean_of(rows, block, divisor), block, x); });
  }

  static TORCHBAGUA_ELEMENT void decode_mean_encode(const Rows& rows, const Table& table, float divisor,
                                                    uint8_t* wire) {
    for_each_block(table, [&](const Block& block) { write(mean_of(rows, block, divisor), block, wire); });
  }

  // `sum(block, i)` is the value of element i. What is not sent is left out.
  template <typename Sum>
  static TORCHBAGUA_ELEMENT void encode_sums(const Table& table, uint8_t* wire, float* left_out, const Sum& sum) {
    for_each_block(table, [&](const Block& block) {
      write(sum(block, block.start), block, wire);
      for (long long i = block.start; i < block.start + block.length; ++i) {
        left_out[i] = i == block.start ? 0.0f : sum(block, i);
      }
    });
  }

  static TORCHBAGUA_ELEMENT void encode_feedback(const float* x, const float* residual, const Table& table,
                                                 uint8_t* wire, float* left_out) {
    encode_sums(table, wire, left_out, [=](const Block&, long long i) { return x[i] + residual[i]; });
  }

  static TORCHBAGUA_ELEMENT void decode_mean_encode_feedback(const Rows& rows, const Table& table, float divisor,
                                                             const float* residual, uint8_t* wire, float* left_out) {
    encode_sums(table, wire, left_out, [&](const Block& block, long long i) {
      return residual[i] + (i == block.start ? mean_of(rows, block, divisor) : 0.0f);
    });
  }
};

TORCHBAGUA_CPU_CODEC(First)

}  // namespace torchbagua::cpu
