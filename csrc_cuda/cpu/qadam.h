// QAdam's update on the CPU: loops over element/qadam.h.
#pragma once

#include <cstdint>

#include "element/qadam.h"
#include "instruction_set.h"

namespace torchbagua::cpu {

// The four tensors of one parameter, `num_elements` each.
template <typename Element>
struct QAdamTensors {
  Element* weight;
  const Element* gradient;
  Element* momentum;
  const Element* second_moment;
};

template <typename Element>
TORCHBAGUA_ELEMENT void qadam_update(const QAdamStep& step, const QAdamTensors<Element>& of, int64_t begin,
                                     int64_t end) {
  Element* const weight = of.weight;
  const Element* const gradient = of.gradient;
  Element* const momentum = of.momentum;
  const Element* const second_moment = of.second_moment;
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    torchbagua::qadam_update(step, gradient[i], second_moment[i], momentum[i], weight[i]);
  }
}

// Gradients to momenta, or averaged momenta to gradients, in place.
template <bool kToMomenta, typename Element>
TORCHBAGUA_ELEMENT void change_form(float* values, const Element* momentum, float beta1, float share, int64_t begin,
                                    int64_t end) {
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    values[i] = kToMomenta ? form_momentum(values[i], momentum[i], beta1, share)
                           : form_gradient(values[i], momentum[i], beta1, share);
  }
}

}  // namespace torchbagua::cpu
