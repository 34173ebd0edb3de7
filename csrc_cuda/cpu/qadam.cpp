// QAdam on the CPU: loops over element/qadam.h, on several threads.
#include "parallel.h"
#include "qadam_ops.h"

namespace torchbagua::cpu {

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

// Converts gradients to momenta, or averaged momenta to gradients, in place.
template <bool kToMomenta, typename Element>
TORCHBAGUA_ELEMENT void change_form(const QAdamForm& form, const FormTensors<Element>& of, long long begin,
                                    long long end) {
  float* const values = of.values;
  const Element* const momentum = of.momentum;
#pragma omp simd
  for (long long i = begin; i < end; ++i) {
    values[i] = kToMomenta ? form_momentum(form, values[i], momentum[i]) : form_gradient(form, values[i], momentum[i]);
  }
}

struct QAdamOnCpu {
  static constexpr auto kDevice = binding::DeviceType::CPU;

  template <typename PointersOf>
  static void update(const binding::NativeOp&, const QAdamStep& step, const binding::Tensors& weights,
                     const PointersOf& pointers_of) {
    for (size_t i = 0; i < weights.size(); ++i) {
      binding::with_element_type(weights[i].scalar_type(), [&](auto element) {
        const auto tensors = pointers_of(element, i);
        in_parallel(weights[i].numel(), [=](long long begin, long long end)
                                            TORCHBAGUA_INLINED { qadam_update(step, tensors, begin, end); });
      });
    }
  }

  template <bool kToMomenta, typename PointersOf>
  static void change_form(const binding::NativeOp&, const QAdamForm& form, const binding::Tensors& momenta,
                          const PointersOf& pointers_of) {
    for (size_t i = 0; i < momenta.size(); ++i) {
      binding::with_element_type(momenta[i].scalar_type(), [&](auto element) {
        const auto tensors = pointers_of(element, i);
        in_parallel(momenta[i].numel(), [=](long long begin, long long end) TORCHBAGUA_INLINED {
          cpu::change_form<kToMomenta>(form, tensors, begin, end);
        });
      });
    }
  }
};

}  // namespace torchbagua::cpu

STABLE_TORCH_LIBRARY_IMPL(torchbagua, CPU, library) {
  torchbagua::binding::QAdamOps<torchbagua::cpu::QAdamOnCpu>::register_in(library);
}
