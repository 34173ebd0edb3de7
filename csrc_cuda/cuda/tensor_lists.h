// Lays out lists of tensors as the tables of launches.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "arguments.h"
#include "kernels/tensor_table.cuh"

namespace torchbagua::cuda {

// As in torchbagua/native/tensor_tables.py.
constexpr int kChunkElements = 8192;

// Calls `launch(element, table, first)` for tables that hold all of `tensors`, of which one holds the next ones that
// are alike in type and device; `pointers_of(element, i)` gives the pointers of the tensors that go with `tensors[i]`.
template <template <typename> class Pointers, typename PointersOf, typename LaunchTable>
void for_each_table(const std::vector<binding::Tensor>& tensors, const PointersOf& pointers_of,
                    const LaunchTable& launch) {
  size_t i = 0;
  while (i < tensors.size()) {
    const binding::Tensor& first = tensors[i];
    binding::with_element_type(first.scalar_type(), [&](auto element) {
      TensorTable<Pointers<decltype(element)>> table{};
      table.chunk_elements = kChunkElements;
      while (i < tensors.size() && table.num_rows < kTableRows && tensors[i].scalar_type() == first.scalar_type() &&
             tensors[i].device() == first.device()) {
        const int64_t num_elements = tensors[i].numel();
        table.rows[table.num_rows++] = {pointers_of(element, i), num_elements, table.num_chunks};
        table.num_chunks += (num_elements + kChunkElements - 1) / kChunkElements;
        ++i;
      }
      launch(element, table, first);
    });
  }
}

}  // namespace torchbagua::cuda
