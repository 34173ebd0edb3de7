// The functors for DenseCodec::encode_formed and decode_formed: values with a residual, the momenta that QAdam sends,
// and the gradients that it restores. element/qadam.h has the arithmetic.
#pragma once

#include "blocks.h"
#include "element/qadam.h"
#include "momenta_arguments.h"

namespace torchbagua::cpu {

// Not inlined into the loops of every codec and instruction set, since momenta are usually float32.
template <typename Element>
void widen(const void* values, long long first, long long length, float* to) {
  const auto* const elements = static_cast<const Element*>(values) + first;
#pragma omp simd
  for (long long k = 0; k < length; ++k) {
    to[k] = to_float(elements[k]);
  }
}

// Calls `body(form, momentum, begin, end)` with the momenta of the elements [first, first + length), which are one part
// of a block, tensor by tensor.
template <typename Body>
TORCHBAGUA_ELEMENT void for_each_momentum(const binding::Momenta& momenta, long long first, long long length,
                                          const Body& body) {
  alignas(64) float widened[kPart];
  for (const binding::Momentum* of = momenta.from(first); length > 0; ++of) {
    const long long end = std::min(first + length, of->end), skipped = first - of->begin;
    const float* momentum = widened;
    if (of->type == binding::ScalarType::Float) {
      momentum = static_cast<const float*>(of->values) + skipped;
      prefetch(momentum + kAhead, end - first);
    } else if (of->type == binding::ScalarType::BFloat16) {
      widen<BFloat16>(of->values, skipped, end - first, widened);
    } else {
      widen<Float16>(of->values, skipped, end - first, widened);
    }
    body(of->form, momentum, first, end);
    length -= end - first;
    first = end;
  }
}

// The values to send: the given values, or, if momenta is not null, the momenta computed from them; plus the residual,
// unless it is null.
struct Sent {
  const float* values;
  const binding::Momenta* momenta;
  const float* residual;

  TORCHBAGUA_ELEMENT void operator()(long long first, long long all, float* to) const {
    const float* sent = to;
    prefetch(values + first + kAhead, all);
    if (momenta == nullptr) {
      sent = values + first;
    } else {
      for_each_momentum(*momenta, first, all,
                        [&](const QAdamForm& form, const float* momentum, long long begin, long long end)
                            TORCHBAGUA_INLINED {
                              const float* const gradients = values + begin;
                              float* const formed = to + (begin - first);
#pragma omp simd
                              for (long long k = 0; k < end - begin; ++k) {
                                formed[k] = form_momentum(form, gradients[k], momentum[k]);
                              }
                            });
    }
    if (residual != nullptr) {
      const float* const left_before = residual + first;
      prefetch(left_before + kAhead, all);
#pragma omp simd
      for (long long k = 0; k < all; ++k) {
        to[k] = sent[k] + left_before[k];
      }
    }
  }
};

// Converts averaged momenta to gradients, in place.
struct Gradients {
  const binding::Momenta& momenta;

  TORCHBAGUA_ELEMENT void operator()(long long first, long long all, float* values) const {
    for_each_momentum(momenta, first, all,
                      [&](const QAdamForm& form, const float* momentum, long long begin, long long end)
                          TORCHBAGUA_INLINED {
                            float* const averages = values + (begin - first);
#pragma omp simd
                            for (long long k = 0; k < end - begin; ++k) {
                              averages[k] = form_gradient(form, averages[k], momentum[k]);
                            }
                          });
  }
};

}  // namespace torchbagua::cpu
