// Tensors and their blocks, as the kernels of every device take them: each tensor is one struct of its data pointer and
// the sizes of its dimensions, in the order of the operation's arguments. Freestanding, like casts.h.
#pragma once

#include "casts.h"

namespace torchbagua {

template <typename T>
struct Span {
  T* data;
  long long size;
};

// One wire per sender.
struct Rows {
  const unsigned char* data;
  long long num_rows;
  long long row_bytes;
};

// A row of a block table; torchbagua/native/block_format.py documents its fields.
struct Block {
  long long start;
  long long length;
  long long header;
  long long payload;
};

struct Table {
  const Block* blocks;
  long long num_blocks;
  long long num_fields;  // unused: a two-dimensional tensor is passed with both sizes
};

// Pass kAnyStart as the number of elements if no x is indexed.
constexpr long long kAnyStart = -1;

TORCHBAGUA_ELEMENT bool lies_within(long long first, long long length, long long size) {
  return first >= 0 && length >= 0 && length <= size && first <= size - length;  // `first + length` might overflow
}

// Whether a block, with a header and a payload of the given sizes, lies in an x of `num_elements` and a wire of
// `wire_bytes`.
TORCHBAGUA_ELEMENT bool is_inside(const Block& block, long long header_bytes, long long payload_bytes,
                                  long long num_elements, long long wire_bytes) {
  return block.length >= 1 && block.header % 4 == 0 &&
         (num_elements == kAnyStart || lies_within(block.start, block.length, num_elements)) &&
         lies_within(block.header, header_bytes, wire_bytes) && lies_within(block.payload, payload_bytes, wire_bytes);
}

}  // namespace torchbagua
