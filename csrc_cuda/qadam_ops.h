// QAdam's operations on the dispatcher, over LibTorch's stable ABI; torchbagua/native/qadam.py documents them. This
// file checks their lists of tensors and converts them to what kernels take.
#pragma once

#include <torch/csrc/stable/library.h>

#include <utility>

#include "momenta_arguments.h"

namespace torchbagua::binding {

template <typename T>
const T* read(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <typename T>
T* write(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

inline void check_length(const NativeOp& operation, const char* name, const Tensors& tensors, size_t length) {
  if (tensors.size() != length) {
    refuse(operation, name, text_of("a list of ", length, " tensors"), text_of("a list of ", tensors.size()));
  }
}

inline bool is_like(const Tensor& one, const Tensor& other) {
  const auto own = one.sizes(), others = other.sizes();
  return one.is_contiguous() && one.scalar_type() == other.scalar_type() && one.device() == other.device() &&
         std::equal(own.begin(), own.end(), others.begin(), others.end());
}

// `Kernels` has kDevice, the device type, and two functions over lists. They take the operation, its numbers, a list,
// and `pointers_of(element, i)`, which returns the pointers of all tensors that belong to tensor i of that list.
template <typename Kernels>
struct QAdamOps {
  // The other lists must be like the weights, tensor by tensor.
  static void update(const Tensors& weights, const Tensors& gradients, const Tensors& momenta,
                     const Tensors& second_moments, double gradient_sign, double weight_decay, double shrink,
                     double beta1, double root_correction2, double eps, double largest_ratio, double step_size) {
    constexpr NativeOp kOperation{"qadam", "update"};
    const std::pair<const char*, const Tensors&> others[] = {
        {"gradients", gradients}, {"momenta", momenta}, {"second_moments", second_moments}};
    for (const auto& [name, tensors] : others) {
      check_length(kOperation, name, tensors, weights.size());
    }
    for (size_t i = 0; i < weights.size(); ++i) {
      const Tensor& weight = weights[i];
      check(Call{kOperation, Kernels::kDevice, weight}, {"weights", weight}, has_elements(weight), kElementTypes, {});
      for (const auto& [name, tensors] : others) {
        if (!is_like(tensors[i], weight)) {
          refuse(kOperation, name, "like weights, " + describe(weight), describe(tensors[i]));
        }
      }
    }
    const QAdamStep step =
        make_qadam_step(gradient_sign, weight_decay, shrink, beta1, root_correction2, eps, largest_ratio, step_size);
    Kernels::update(kOperation, step, weights, [&](auto element, size_t i) {
      using T = decltype(element);
      return QAdamTensors<T>{write<T>(weights[i]), read<T>(gradients[i]), write<T>(momenta[i]),
                             read<T>(second_moments[i])};
    });
  }

  static void form_momenta(const Tensors& gradients, const Tensors& momenta, double beta1, double share) {
    change_form<true>({"qadam", "form_momenta"}, "gradients", gradients, momenta, beta1, share);
  }

  static void form_gradients(const Tensors& averages, const Tensors& momenta, double beta1, double share) {
    change_form<false>({"qadam", "form_gradients"}, "averages", averages, momenta, beta1, share);
  }

  template <bool kToMomenta>
  static void change_form(const NativeOp& operation, const char* values_name, const Tensors& values,
                          const Tensors& momenta, double beta1, double share) {
    check_length(operation, "momenta", momenta, values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      const Call call{operation, Kernels::kDevice, values[i]};
      const auto span = span_of<const float>(call, {values_name, values[i]});
      check(call, {"momenta", momenta[i]}, has_elements(momenta[i]), kElementTypes, {{"N", span.size}});
    }
    const QAdamForm form{static_cast<float>(beta1), static_cast<float>(share)};
    Kernels::template change_form<kToMomenta>(operation, form, momenta, [&](auto element, size_t i) {
      return FormTensors<decltype(element)>{write<float>(values[i]), read<decltype(element)>(momenta[i])};
    });
  }

  template <typename Library>
  static void register_in(Library& library) {
    library.impl("qadam_update", TORCH_BOX(&QAdamOps::update));
    library.impl("qadam_form_momenta", TORCH_BOX(&QAdamOps::form_momenta));
    library.impl("qadam_form_gradients", TORCH_BOX(&QAdamOps::form_gradients));
  }
};

}  // namespace torchbagua::binding
