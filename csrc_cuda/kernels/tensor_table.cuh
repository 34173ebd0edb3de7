// One launch for many tensors, small and large. The kernel's arguments list the tensors, so nothing has to be copied to
// the device before the launch, and nothing has to be stored until it has ended.
#pragma once

namespace torchbagua::cuda {

constexpr int kTableThreads = 256;  // the most in a thread block
constexpr int kTableRows = 64;

// Tensors of `num_elements` elements each.
template <typename Pointers>
struct TableRow {
  Pointers pointers;
  long long num_elements;
  long long first_chunk;  // the number of chunks in the rows before this row
};

// The work of a launch. The tensors of a row are divided into chunks of `chunk_elements`; the last chunk may be
// shorter, and empty tensors have none. This distributes small and large tensors evenly over the thread blocks.
template <typename Pointers>
struct TensorTable {
  TableRow<Pointers> rows[kTableRows];
  long long num_chunks;
  int num_rows;
  int chunk_elements;  // at most 2^30; a multiple of 8 keeps the chunks of aligned tensors aligned
};

// The row of `chunk`: the last row that does not begin after it. (An empty row begins where the next row does.)
template <typename Pointers>
__device__ __forceinline__ const TableRow<Pointers>& row_of(const TensorTable<Pointers>& table, long long chunk) {
  int first = 0, last = table.num_rows - 1;
  while (first < last) {
    const int middle = last - (last - first) / 2;
    if (table.rows[middle].first_chunk <= chunk) {
      first = middle;
    } else {
      last = middle - 1;
    }
  }
  return table.rows[first];
}

// Calls `body(pointers, length)` for the chunks of this thread block, with pointers to their first elements. Any number
// of thread blocks works. Pointer offsets are 64-bit, for tensors of more than 2^31 elements; within a chunk, 32 bits
// are enough, and faster.
template <typename Pointers, typename Body>
__device__ __forceinline__ void for_each_chunk(const TensorTable<Pointers>& table, const Body& body) {
  for (long long chunk = blockIdx.x; chunk < table.num_chunks; chunk += gridDim.x) {
    const TableRow<Pointers>& row = row_of(table, chunk);
    const long long begin = (chunk - row.first_chunk) * table.chunk_elements;
    const long long rest = row.num_elements - begin;
    body(row.pointers.from(begin), rest < table.chunk_elements ? static_cast<int>(rest) : table.chunk_elements);
  }
}

}  // namespace torchbagua::cuda
