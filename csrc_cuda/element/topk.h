// TopK, one element and one block at a time; docs/arithmetic.md has the formulas. Every operation is one float32
// operation rounded to nearest even. Freestanding, as casts.h.
#pragma once

#include "blocks.h"

namespace torchbagua {

constexpr int kLongestSparseBlock = 4096;
constexpr int kSparseHeaderBytes = 4;

// A row of a sparse codec's table.
struct SparseBlock : Block {
  long long kept;
};

TORCHBAGUA_ELEMENT const SparseBlock& sparse_block(const Table& table, long long b) {
  return reinterpret_cast<const SparseBlock*>(table.blocks)[b];
}

// How many bits an index into a block of `length` elements takes.
TORCHBAGUA_ELEMENT int index_bits(long long length) {
  int bits = 0;
  while ((1ll << bits) < length) {
    ++bits;
  }
  return bits;
}

TORCHBAGUA_ELEMENT long long index_bytes(const SparseBlock& block) {
  return (block.kept * index_bits(block.length) + 7) / 8;
}

// Only of a block that has_kept.
TORCHBAGUA_ELEMENT long long payload_bytes(const SparseBlock& block) { return index_bytes(block) + block.kept; }

TORCHBAGUA_ELEMENT bool has_kept(const SparseBlock& block) {
  return 1 <= block.kept && block.kept <= block.length && block.length <= kLongestSparseBlock;
}

TORCHBAGUA_ELEMENT bool is_inside(const SparseBlock& block, long long num_elements, long long wire_bytes) {
  return has_kept(block) && is_inside(block, kSparseHeaderBytes, payload_bytes(block), num_elements, wire_bytes);
}

// Number `i` of a stream of numbers of `bits` bits, at most 16, the lowest bit first. Reads none of the bytes that it
// does not reach.
TORCHBAGUA_ELEMENT int read_index(const unsigned char* stream, long long i, int bits) {
  const long long first = i * bits;
  unsigned int word = 0;
  for (long long byte = first / 8; byte * 8 < first + bits; ++byte) {
    word |= static_cast<unsigned int>(stream[byte]) << (8 * (byte - first / 8));
  }
  return static_cast<int>(word >> (first % 8) & ((1u << bits) - 1));
}

// Byte `byte` of such a stream of `count` numbers, where `at(i)` is number i.
template <typename At>
TORCHBAGUA_ELEMENT unsigned char index_byte(long long byte, long long count, int bits, const At& at) {
  unsigned int result = 0;
  for (long long i = byte * 8 / bits; i < count && i * bits < byte * 8 + 8; ++i) {
    const long long shift = i * bits - byte * 8;
    const unsigned int index = static_cast<unsigned int>(at(i));
    result |= shift < 0 ? index >> -shift : index << shift;
  }
  return static_cast<unsigned char>(result);
}

// How values of a block are coded, by the largest magnitude of it.
struct ValueCoder {
  float largest;  // NaN where the block cannot be coded
  float inverse;
  float step;
};

TORCHBAGUA_ELEMENT bool is_usable(const ValueCoder& coder) {
  // All that has the sign bit, -0 too, lies above the limit as an unsigned number.
  return bits_of(coder.largest) < static_cast<unsigned int>(kUnusableMagnitude);
}

// Any header is accepted; one that no encoder writes is not usable.
TORCHBAGUA_ELEMENT ValueCoder make_value_coder(float largest) {
  constexpr float kNarrowest = 0x1p-118f;
  constexpr float kLargestCode = 127.0f;
  ValueCoder coder{largest, 0.0f, 0.0f};
  if (!is_usable(coder)) {
    coder.largest = not_a_number();
  } else if (largest >= kNarrowest) {
    coder.inverse = kLargestCode / largest;
    coder.step = largest / kLargestCode;
  }
  return coder;
}

TORCHBAGUA_ELEMENT unsigned char code_of(const ValueCoder& coder, float value) {
  constexpr float kRoundingShift = 12582912.0f;  // 1.5 * 2^23
  const float rounded = (value * coder.inverse + kRoundingShift) - kRoundingShift;
  return static_cast<unsigned char>(rounded + 128.0f);
}

TORCHBAGUA_ELEMENT float value_of(const ValueCoder& coder, unsigned char code) {
  return (static_cast<float>(code) - 128.0f) * coder.step + 0.0f;  // -0 becomes +0
}

}  // namespace torchbagua
