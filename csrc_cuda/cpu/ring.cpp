// The ring of compressed differences on the dispatcher, over LibTorch's stable ABI, for CPUs: loops over
// element/ring.h. torchbagua/native/ring.py documents the operations.
#include "element/ring.h"

#include <torch/csrc/stable/library.h>

#include "arguments.h"
#include "parallel.h"

namespace torchbagua::cpu {

inline void ring_difference(const binding::Tensor& weights, const binding::Tensor& own, const binding::Tensor& left,
                            const binding::Tensor& right, const binding::Tensor& difference) {
  const binding::Call call{{"ring", "difference"}, binding::DeviceType::CPU, weights};
  const auto x = binding::span_of<const float>(call, {"weights", weights});
  const auto of_self = binding::span_of<const float>(call, {"own", own, x.size});
  const auto of_left = binding::span_of<const float>(call, {"left", left, x.size});
  const auto of_right = binding::span_of<const float>(call, {"right", right, x.size});
  const auto result = binding::span_of<float>(call, {"difference", difference, x.size});
  in_parallel(x.size, [=](long long begin, long long end) TORCHBAGUA_INLINED {
    if (of_left.data == of_right.data) {  // a ring of two: saves a division, the most expensive step
#pragma omp simd
      for (long long i = begin; i < end; ++i) {
        const float third = of_left.data[i] / 3.0f;
        result.data[i] = torchbagua::ring_difference(x.data[i], of_self.data[i], third, third);
      }
      return;
    }
#pragma omp simd
    for (long long i = begin; i < end; ++i) {
      const float third_of_left = of_left.data[i] / 3.0f, third_of_right = of_right.data[i] / 3.0f;
      result.data[i] = torchbagua::ring_difference(x.data[i], of_self.data[i], third_of_left, third_of_right);
    }
  });
}

inline void ring_advance(const binding::Tensor& difference, const binding::Tensor& own,
                         const binding::Tensor& weights) {
  const binding::Call call{{"ring", "advance"}, binding::DeviceType::CPU, difference};
  const auto change = binding::span_of<const float>(call, {"difference", difference});
  const auto replica = binding::span_of<float>(call, {"own", own, change.size});
  const auto x = binding::span_of<float>(call, {"weights", weights, change.size});
  in_parallel(change.size, [=](long long begin, long long end) TORCHBAGUA_INLINED {
#pragma omp simd
    for (long long i = begin; i < end; ++i) {
      x.data[i] = replica.data[i] += change.data[i];
    }
  });
}

}  // namespace torchbagua::cpu

STABLE_TORCH_LIBRARY_IMPL(torchbagua, CPU, library) {
  library.impl("ring_difference", TORCH_BOX(&torchbagua::cpu::ring_difference));
  library.impl("ring_advance", TORCH_BOX(&torchbagua::cpu::ring_advance));
}
