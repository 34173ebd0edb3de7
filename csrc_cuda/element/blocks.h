// Tensors and the blocks in them, as the kernels of every device take them: each tensor as one struct of its data and
// then the sizes of its dimensions, in the order of the operation's arguments. Freestanding, as casts.h.
#pragma once

#include "casts.h"

namespace torchbagua {

template <typename T>
struct Span {
  T* data;
  long long size;
};

// One wire of each sender.
struct Rows {
  const unsigned char* data;
  long long num_rows;
  long long row_bytes;
};

// A row of a block table; torchbagua/native/block_format.py has the meaning of its fields.
struct Block {
  long long start;
  long long length;
  long long header;
  long long payload;
};

struct Table {
  const Block* blocks;
  long long num_blocks;
  long long num_fields;  // read by nothing: here because a tensor of two dimensions comes with both its sizes
};

// Pass kAnyStart for the number of elements where no x is indexed.
constexpr long long kAnyStart = -1;

TORCHBAGUA_ELEMENT bool lies_within(long long first, long long length, long long size) {
  return first >= 0 && length >= 0 && length <= size && first <= size - length;  // `first + length` might overflow
}

// Whether a block lies in an x of `num_elements` and a wire of `wire_bytes`, of which it takes the bytes given.
TORCHBAGUA_ELEMENT bool is_inside(const Block& block, long long header_bytes, long long payload_bytes,
                                  long long num_elements, long long wire_bytes) {
  return block.length >= 1 && block.header % 4 == 0 &&
         (num_elements == kAnyStart || lies_within(block.start, block.length, num_elements)) &&
         lies_within(block.header, header_bytes, wire_bytes) && lies_within(block.payload, payload_bytes, wire_bytes);
}

}  // namespace torchbagua
