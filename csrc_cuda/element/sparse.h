// Code shared by the sparse codecs, one element and one block at a time; docs/arithmetic.md has the formulas. Every
// operation is one float32 operation rounded to nearest even. Freestanding, like casts.h.
//
// A codec's format is a struct with index_bytes, the size of a block's indices in its payload. One byte per element
// that is sent follows them.
#pragma once

#include "blocks.h"

namespace torchbagua {

constexpr int kLongestSparseBlock = 4096;
constexpr int kSparseHeaderBytes = 4;

// A row of a sparse codec's table.
struct SparseBlock : Block {
  long long kept;
};

TORCHBAGUA_ELEMENT const SparseBlock& sparse_block_of(const Table& table, long long b) {
  return reinterpret_cast<const SparseBlock*>(table.blocks)[b];
}

// Only for a block for which has_kept is true.
template <typename Format>
TORCHBAGUA_ELEMENT long long payload_bytes_of(const SparseBlock& block) {
  return Format::index_bytes(block) + block.kept;
}

TORCHBAGUA_ELEMENT bool has_kept(const SparseBlock& block) {
  return 1 <= block.kept && block.kept <= block.length && block.length <= kLongestSparseBlock;
}

template <typename Format>
TORCHBAGUA_ELEMENT bool is_row_inside(const SparseBlock& block, long long num_elements, long long wire_bytes) {
  return has_kept(block) &&
         is_inside(block, kSparseHeaderBytes, payload_bytes_of<Format>(block), num_elements, wire_bytes);
}

// Encodes and decodes the values of a block, given the largest magnitude of the elements that are sent.
struct ValueCoder {
  float largest;  // NaN if the block cannot be encoded
  float inverse;
  float step;
};

TORCHBAGUA_ELEMENT bool is_usable(const ValueCoder& coder) {
  // As unsigned integers, all values with the sign bit, including -0, exceed the limit.
  return bits_of(coder.largest) < static_cast<unsigned int>(kUnusableMagnitude);
}

// Accepts any header; the coder for a header that no encoder writes is not usable.
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
