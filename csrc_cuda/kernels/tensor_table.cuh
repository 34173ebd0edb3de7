// One launch for many tensors, small and large. Which ones stands in the kernel's arguments: so nothing has to be
// copied to the device before the launch, and nothing kept until it has ended.
#pragma once

namespace torchbagua::cuda {

constexpr int kTableThreads = 256;  // of a thread block, at most
constexpr int kTableRows = 64;

// Tensors of `num_elements` each.
template <typename Pointers>
struct TableRow {
  Pointers pointers;
  long long num_elements;
  long long first_chunk;  // how many chunks the rows before this one have
};

// What a launch works through. The tensors of a row are cut into chunks of `chunk_elements`, the last may be shorter,
// and empty ones have none: so small and large tensors share the thread blocks evenly.
template <typename Pointers>
struct TensorTable {
  TableRow<Pointers> rows[kTableRows];
  long long num_chunks;
  int num_rows;
  int chunk_elements;  // at most 2^30; a multiple of 8 leaves the chunks of aligned tensors aligned
};

// The row that `chunk` is of: the last that begins no later. (An empty one begins where the next does.)
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
// of thread blocks does. Pointers are moved in 64 bits, for tensors of more than 2^31 elements; within a chunk 32 are
// enough, and faster.
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
