// What QAdam's operations refuse of their lists of tensors, in the words of torchbagua/native/qadam.py.
#pragma once

#include <utility>
#include <vector>

#include "arguments.h"

namespace torchbagua::binding {

using Tensors = std::vector<Tensor>;

inline void check_length(const Operation& operation, const char* name, const Tensors& tensors, size_t length) {
  if (tensors.size() != length) {
    refuse(operation, name, text_of("a list of ", length, " tensors"), text_of("a list of ", tensors.size()));
  }
}

inline bool has_same_shape(const Tensor& one, const Tensor& other) {
  return std::equal(one.sizes().begin(), one.sizes().end(), other.sizes().begin(), other.sizes().end());
}

// Refuses what qadam_update cannot take: the other lists must be like the weights, tensor by tensor.
inline void check_update(DeviceType place, const Tensors& weights, const Tensors& gradients, const Tensors& momenta,
                         const Tensors& second_moments) {
  const std::pair<const char*, const Tensors&> others[] = {
      {"gradients", gradients}, {"momenta", momenta}, {"second_moments", second_moments}};
  constexpr Operation kOperation{"qadam", "update"};
  for (const auto& [name, tensors] : others) {
    check_length(kOperation, name, tensors, weights.size());
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    const Tensor& weight = weights[i];
    const Call call{kOperation, place, weight};
    check(call, {"weights", weight}, has_elements(weight), kElementTypes, {});
    for (const auto& [name, tensors] : others) {
      if (!tensors[i].is_contiguous() || tensors[i].scalar_type() != weight.scalar_type() ||
          tensors[i].device() != weight.device() || !has_same_shape(tensors[i], weight)) {
        refuse(call, name, "like weights, " + describe(weight), describe(tensors[i]));
      }
    }
  }
}

// The same for qadam_form_momenta and qadam_form_gradients, which call the first list `values_name`.
inline void check_forms(DeviceType place, const char* name, const char* values_name, const Tensors& values,
                        const Tensors& momenta) {
  const Operation operation{"qadam", name};
  check_length(operation, "momenta", momenta, values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const Call call{operation, place, values[i]};
    const auto span = span_of<const float>(call, {values_name, values[i]});
    check(call, {"momenta", momenta[i], span.size}, has_elements(momenta[i]), kElementTypes, {{"N", span.size}});
  }
}

}  // namespace torchbagua::binding
