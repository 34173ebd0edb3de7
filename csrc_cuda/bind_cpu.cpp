// The CPU kernels of torchbagua on the dispatcher, over LibTorch's stable ABI; torchbagua/native/operations.py has the
// schemas.

// The codecs, which give torch their operations: a line each.
#include "cpu/minmax_uint8.h"
#include "cpu/sign_1bit.h"

// What else there is.
#include <torch/csrc/stable/ops.h>

#include <string>

#include "cpu/qadam.h"
#include "qadam_arguments.h"

namespace {

namespace cpu = torchbagua::cpu;
using torchbagua::binding::check_forms;
using torchbagua::binding::check_update;
using torchbagua::binding::DeviceType;
using torchbagua::binding::Tensors;
using torchbagua::binding::with_element_type;

// Elements that a thread takes at least: less is not worth waking it.
constexpr int64_t kGrain = 1 << 15;

// Calls `body(begin, end)` on several threads, under the instruction set.
template <typename Body>
void in_parallel(int64_t num_elements, const Body& body) {
  torch::stable::parallel_for(0, num_elements, kGrain, [&](int64_t begin, int64_t end) {
    cpu::run_under(cpu::kInstructionSet, [&]() TORCHBAGUA_INLINED { body(begin, end); });
  });
}

void qadam_update(const Tensors& weights, const Tensors& gradients, const Tensors& momenta,
                  const Tensors& second_moments, double gradient_sign, double weight_decay, double shrink, double beta1,
                  double root_correction2, double eps, double largest_ratio, double step_size) {
  check_update(DeviceType::CPU, weights, gradients, momenta, second_moments);
  const torchbagua::QAdamStep step = torchbagua::make_qadam_step(gradient_sign, weight_decay, shrink, beta1,
                                                                 root_correction2, eps, largest_ratio, step_size);
  for (size_t i = 0; i < weights.size(); ++i) {
    with_element_type(weights[i].scalar_type(), [&](auto element) {
      using Element = decltype(element);
      const cpu::QAdamTensors<Element> tensors{static_cast<Element*>(weights[i].mutable_data_ptr()),
                                               static_cast<const Element*>(gradients[i].const_data_ptr()),
                                               static_cast<Element*>(momenta[i].mutable_data_ptr()),
                                               static_cast<const Element*>(second_moments[i].const_data_ptr())};
      in_parallel(weights[i].numel(),
                  [=](int64_t begin, int64_t end) TORCHBAGUA_INLINED { cpu::qadam_update(step, tensors, begin, end); });
    });
  }
}

// qadam_form_momenta, or qadam_form_gradients.
template <bool kToMomenta>
void qadam_change_form(const Tensors& values, const Tensors& momenta, double beta1, double share) {
  check_forms(DeviceType::CPU, kToMomenta ? "form_momenta" : "form_gradients", kToMomenta ? "gradients" : "averages",
              values, momenta);
  const torchbagua::QAdamForm form{static_cast<float>(beta1), static_cast<float>(share)};
  for (size_t i = 0; i < values.size(); ++i) {
    with_element_type(momenta[i].scalar_type(), [&](auto element) {
      auto* data = static_cast<float*>(values[i].mutable_data_ptr());
      const auto* momentum = static_cast<const decltype(element)*>(momenta[i].const_data_ptr());
      in_parallel(values[i].numel(), [=](int64_t begin, int64_t end) TORCHBAGUA_INLINED {
        cpu::change_form<kToMomenta>(form, data, momentum, begin, end);
      });
    });
  }
}

std::string cpu_instruction_set() { return cpu::name_of(cpu::kInstructionSet); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchbagua, CPU, library) {
  library.impl("qadam_form_momenta", TORCH_BOX(&qadam_change_form<true>));
  library.impl("qadam_form_gradients", TORCH_BOX(&qadam_change_form<false>));
  library.impl("qadam_update", TORCH_BOX(&qadam_update));
}

// An operation without a tensor has no device to be dispatched on.
STABLE_TORCH_LIBRARY_IMPL(torchbagua, CompositeExplicitAutograd, library) {
  library.impl("cpu_instruction_set", TORCH_BOX(&cpu_instruction_set));
}
