// One element of QAdam after its warm-up; docs/arithmetic.md has the formulas. Freestanding: g++, nvcc and NVRTC
// compile this header without any other than casts.h, with bitwise equal results.
#pragma once

#include "casts.h"

namespace torchbagua {

// The four tensors of one parameter.
template <typename Element>
struct QAdamTensors {
  Element* weight;
  const Element* gradient;
  Element* momentum;
  const Element* second_moment;

  TORCHBAGUA_ELEMENT QAdamTensors from(long long element) const {
    return {weight + element, gradient + element, momentum + element, second_moment + element};
  }
};

// The values to convert between gradients and momenta, and the momentum that enters the conversion.
template <typename Element>
struct FormTensors {
  float* values;
  const Element* momentum;

  TORCHBAGUA_ELEMENT FormTensors from(long long element) const { return {values + element, momentum + element}; }
};

// The numbers of a step, shared by all elements of a tensor.
struct QAdamStep {
  float gradient_sign;  // -1 if the objective is maximized
  float weight_decay;   // added to the gradient; 0 if weight decay is decoupled
  float shrink;         // factor of decoupled weight decay on a weight, 1 - lr * weight_decay
  float beta1;
  float root_correction2;  // square root of the frozen bias correction of the second moment
  float eps;
  float largest_ratio;  // bound on the magnitude of momentum / denominator
  float step_size;      // lr / bias correction of the momentum
  float one_minus_beta1;
};

// The numbers of a conversion between gradients and momenta.
struct QAdamForm {
  float beta1;
  float share;  // (1 - beta1) / loss scale
};

// The step from the numbers of qadam_update, see torchbagua/native/qadam.py.
TORCHBAGUA_ELEMENT QAdamStep make_qadam_step(double gradient_sign, double weight_decay, double shrink, double beta1,
                                             double root_correction2, double eps, double largest_ratio,
                                             double step_size) {
  return QAdamStep{
      static_cast<float>(gradient_sign), static_cast<float>(weight_decay),     static_cast<float>(shrink),
      static_cast<float>(beta1),         static_cast<float>(root_correction2), static_cast<float>(eps),
      static_cast<float>(largest_ratio), static_cast<float>(step_size),        static_cast<float>(1.0 - beta1)};
}

// Correctly rounded on CPU and GPU.
TORCHBAGUA_ELEMENT float square_root(float value) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(value);
#else
  return __builtin_sqrtf(value);
#endif
}

// Reads all four; writes the weight and the momentum.
template <typename Element>
TORCHBAGUA_ELEMENT void qadam_update(const QAdamStep& step, Element gradient, Element second_moment, Element& momentum,
                                     Element& weight) {
  const float kept = to_float(weight) * step.shrink;
  const float slope = to_float(gradient) * step.gradient_sign + step.weight_decay * kept;
  const float moved = step.beta1 * to_float(momentum) + step.one_minus_beta1 * slope;
  const float variance = to_float(second_moment);
  const float denominator = square_root(variance) / step.root_correction2 + step.eps;
  const float ratio = smaller(larger(moved / denominator, -step.largest_ratio), step.largest_ratio);
  const float distance = step.step_size * ratio;
  from_float(moved, momentum);
  from_float(kept - float_of(select(variance == 0.0f, 0u, bits_of(distance))), weight);
}

// The momentum that a rank sends, computed from its gradient.
template <typename Element>
TORCHBAGUA_ELEMENT float form_momentum(const QAdamForm& form, float gradient, Element momentum) {
  return gradient * form.share + to_float(momentum) * form.beta1;
}

// The gradient that yields an averaged momentum.
template <typename Element>
TORCHBAGUA_ELEMENT float form_gradient(const QAdamForm& form, float average, Element momentum) {
  return (average - to_float(momentum) * form.beta1) / form.share;
}

}  // namespace torchbagua
