// QAdam on CUDA: converts lists of tensors to the tables of launches.
#pragma once

#include "codec.h"
#include "kernels/qadam.cuh"
#include "launch.h"
#include "qadam_ops.h"

namespace torchbagua::cuda {

// As in torchbagua/native/tensor_tables.py.
constexpr int kChunkElements = 8192;

// Calls `launch(element, table, first)` for tables that together contain all of `tensors`. A table contains consecutive
// tensors of the same type and device; `pointers_of(element, i)` returns the pointers of all tensors that belong to
// `tensors[i]`.
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

struct QAdamOnCuda {
  static constexpr auto kDevice = binding::DeviceType::CUDA;

  template <typename PointersOf>
  static void update(const binding::NativeOp& operation, const QAdamStep& step, const binding::Tensors& weights,
                     const PointersOf& pointers_of) {
    for_each_table<QAdamTensors>(
        weights, pointers_of, [&](auto element, const auto& table, const binding::Tensor& first) {
          constexpr auto kKernels = TORCHBAGUA_KERNEL_OF_TYPE(torchbagua_qadam_update);
          launch({operation, kDevice, first}, table.num_chunks, kTableThreads, kKernels(element), table, step);
        });
  }

  template <bool kToMomenta, typename PointersOf>
  static void change_form(const binding::NativeOp& operation, const QAdamForm& form, const binding::Tensors& momenta,
                          const PointersOf& pointers_of) {
    for_each_table<FormTensors>(
        momenta, pointers_of, [&](auto element, const auto& table, const binding::Tensor& first) {
          constexpr auto kTo = TORCHBAGUA_KERNEL_OF_TYPE(torchbagua_qadam_form_momenta);
          constexpr auto kFrom = TORCHBAGUA_KERNEL_OF_TYPE(torchbagua_qadam_form_gradients);
          const auto kernel = kToMomenta ? kTo(element) : kFrom(element);
          launch({operation, kDevice, first}, table.num_chunks, kTableThreads, kernel, table, form);
        });
  }
};

inline void add_qadam_kernels() {
  add_kernels_of_type(TORCHBAGUA_KERNEL_OF_TYPE(torchbagua_qadam_update));
  add_kernels_of_type(TORCHBAGUA_KERNEL_OF_TYPE(torchbagua_qadam_form_momenta));
  add_kernels_of_type(TORCHBAGUA_KERNEL_OF_TYPE(torchbagua_qadam_form_gradients));
}

}  // namespace torchbagua::cuda

STABLE_TORCH_LIBRARY_IMPL(torchbagua, CUDA, library) {
  torchbagua::binding::QAdamOps<torchbagua::cuda::QAdamOnCuda>::register_in(library);
  torchbagua::cuda::add_qadam_kernels();
}
