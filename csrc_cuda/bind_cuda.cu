// The CUDA kernels of torchbagua on the dispatcher, over LibTorch's stable ABI; torchbagua/native/operations.py has the
// schemas. Codecs give torch their operations in their files below kernels/.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

// First: it says what the codecs' last lines do.
#include "cuda/codec.h"
// Then the kernels.
#include "cuda/tensor_lists.h"
#include "kernels/all.cuh"
#include "qadam_arguments.h"

namespace {

namespace cuda = torchbagua::cuda;
using torchbagua::binding::Call;
using torchbagua::binding::check_forms;
using torchbagua::binding::check_update;
using torchbagua::binding::DeviceType;
using torchbagua::binding::Tensor;
using torchbagua::binding::Tensors;

template <typename T>
const T* read(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <typename T>
T* write(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

void qadam_update(const Tensors& weights, const Tensors& gradients, const Tensors& momenta,
                  const Tensors& second_moments, double gradient_sign, double weight_decay, double shrink, double beta1,
                  double root_correction2, double eps, double largest_ratio, double step_size) {
  check_update(DeviceType::CUDA, weights, gradients, momenta, second_moments);
  const torchbagua::QAdamStep step = torchbagua::make_qadam_step(gradient_sign, weight_decay, shrink, beta1,
                                                                 root_correction2, eps, largest_ratio, step_size);
  cuda::for_each_table<cuda::QAdamTensors>(
      weights,
      [&](auto element, size_t i) {
        using T = decltype(element);
        return cuda::QAdamTensors<T>{write<T>(weights[i]), read<T>(gradients[i]), write<T>(momenta[i]),
                                     read<T>(second_moments[i])};
      },
      [&](auto element, const auto& table, const Tensor& first) {
        constexpr auto kKernels = TORCHBAGUA_KERNEL_OF_TYPE(cuda::torchbagua_qadam_update);
        const Call call{{"qadam", "update"}, DeviceType::CUDA, first};
        cuda::launch(call, table.num_chunks, cuda::kTableThreads, kKernels(element), table, step);
      });
}

// qadam_form_momenta, or qadam_form_gradients, by `kernels`.
template <typename Kernels>
void change_form(const char* name, const char* values_name, const Tensors& values, const Tensors& momenta,
                 const torchbagua::QAdamForm& form, Kernels kernels) {
  check_forms(DeviceType::CUDA, name, values_name, values, momenta);
  cuda::for_each_table<cuda::FormTensors>(
      momenta,
      [&](auto element, size_t i) {
        return cuda::FormTensors<decltype(element)>{write<float>(values[i]), read<decltype(element)>(momenta[i])};
      },
      [&](auto element, const auto& table, const Tensor& first) {
        const Call call{{"qadam", name}, DeviceType::CUDA, first};
        cuda::launch(call, table.num_chunks, cuda::kTableThreads, kernels(element), table, form);
      });
}

void qadam_form_momenta(const Tensors& gradients, const Tensors& momenta, double beta1, double share) {
  change_form("form_momenta", "gradients", gradients, momenta, {static_cast<float>(beta1), static_cast<float>(share)},
              TORCHBAGUA_KERNEL_OF_TYPE(cuda::torchbagua_qadam_form_momenta));
}

void qadam_form_gradients(const Tensors& averages, const Tensors& momenta, double beta1, double share) {
  change_form("form_gradients", "averages", averages, momenta, {static_cast<float>(beta1), static_cast<float>(share)},
              TORCHBAGUA_KERNEL_OF_TYPE(cuda::torchbagua_qadam_form_gradients));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchbagua, CUDA, library) {
  library.impl("qadam_update", TORCH_BOX(&qadam_update));
  library.impl("qadam_form_momenta", TORCH_BOX(&qadam_form_momenta));
  library.impl("qadam_form_gradients", TORCH_BOX(&qadam_form_gradients));
}
