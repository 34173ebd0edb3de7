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
TORCHBAGUA_ELEMENT void qadam_update(const QAdamStep& step, const QAdamTensors<Element>& of, long long begin,
                                     long long end) {
  Element* const weight = of.weight;
  const Element* const gradient = of.gradient;
  Element* const momentum = of.momentum;
  const Element* const second_moment = of.second_moment;
#pragma omp simd
  for (long long i = begin; i < end; ++i) {
    torchbagua::qadam_update(step, gradient[i], second_moment[i], momentum[i], weight[i]);
  }
}

// Gradients to momenta, or averaged momenta to gradients, in place.
template <bool kToMomenta, typename Element>
TORCHBAGUA_ELEMENT void change_form(const QAdamForm& form, float* values, const Element* momentum, long long begin,
                                    long long end) {
#pragma omp simd
  for (long long i = begin; i < end; ++i) {
    values[i] = kToMomenta ? form_momentum(form, values[i], momentum[i]) : form_gradient(form, values[i], momentum[i]);
  }
}

}  // namespace torchbagua::cpu
