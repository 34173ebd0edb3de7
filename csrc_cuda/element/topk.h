// The indices of TopK in a payload; see docs/wire-formats.md. Freestanding, like casts.h.
#pragma once

#include "sparse.h"

namespace torchbagua {

// The number of bits of an index into a block of `length` elements.
TORCHBAGUA_ELEMENT int index_bits(long long length) {
  int bits = 0;
  while ((1ll << bits) < length) {
    ++bits;
  }
  return bits;
}

struct TopKFormat {
  static TORCHBAGUA_ELEMENT long long index_bytes(const SparseBlock& block) {
    return (block.kept * index_bits(block.length) + 7) / 8;
  }
};

// Number `i` of a stream of numbers of `bits` bits, at most 16, the lowest bit first. Reads only the bytes that contain
// the number.
TORCHBAGUA_ELEMENT int read_index(const unsigned char* stream, long long i, int bits) {
  const long long first = i * bits;
  unsigned int word = 0;
  for (long long byte = first / 8; byte * 8 < first + bits; ++byte) {
    word |= static_cast<unsigned int>(stream[byte]) << (8 * (byte - first / 8));
  }
  return static_cast<int>(word >> (first % 8) & ((1u << bits) - 1));
}

// Byte `byte` of such a stream of `count` numbers; `at(i)` is number i.
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

}  // namespace torchbagua
