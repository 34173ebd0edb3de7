// What the kernels' bindings refuse of their arguments, in the words of torchbagua/native/schema.py.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "element/casts.h"

namespace torchbagua::cpu {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Python sees std::invalid_argument as a ValueError.
[[noreturn]] inline void refuse(const char* op, const char* argument, const std::string& allowed,
                                const std::string& got) {
  throw std::invalid_argument(std::string("torchbagua::") + op + ": " + argument + " must be " + allowed + ", got " +
                              got);
}

template <typename... Parts>
std::string text_of(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

inline std::string describe(const Tensor& tensor) {
  std::string shape;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    shape += text_of(i == 0 ? "" : ", ", tensor.size(i));
  }
  return text_of(tensor.is_contiguous() ? "" : "non-contiguous ", toString(tensor.scalar_type()), " [", shape, "] on ",
                 tensor.is_cpu() ? "the CPU" : "another device");
}

// What every access to a tensor's data rests on.
inline bool is_plain(const Tensor& tensor, int64_t num_dims) {
  return tensor.is_cpu() && tensor.dim() == num_dims && tensor.is_contiguous();
}

inline void check_bytes(const char* op, const char* argument, const Tensor& tensor, int64_t num_dims) {
  if (!is_plain(tensor, num_dims) || tensor.scalar_type() != ScalarType::Byte) {
    refuse(op, argument, text_of("contiguous uint8 ", num_dims == 1 ? "[W]" : "[R, W]"), describe(tensor));
  }
}

inline bool lies_within(int64_t first, int64_t length, int64_t size) {
  return first >= 0 && length >= 0 && length <= size && first <= size - length;  // `first + length` might overflow
}

// Pass kAnyStart for `num_elements` where no x is indexed.
constexpr int64_t kAnyStart = -1;

// Calls `body` with a value of the type of x's elements; returns whether there is one.
template <typename Body>
bool with_element_of(const Tensor& x, const Body& body) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      body(float{});
      return true;
    case ScalarType::BFloat16:
      body(BFloat16{});
      return true;
    case ScalarType::Half:
      body(Float16{});
      return true;
    default:
      return false;
  }
}

// The same for the x of a codec, which must be [N].
template <typename Body>
void with_element_of_x(const char* op, const Tensor& x, const Body& body) {
  if (!is_plain(x, 1) || !with_element_of(x, body)) {
    refuse(op, "x", "contiguous float32, bfloat16 or float16 [N]", describe(x));
  }
}

// Refuses unless `tensor` is contiguous float32 [num_elements]; any length where that is kAnyStart.
inline void check_floats(const char* op, const char* argument, const Tensor& tensor, int64_t num_elements) {
  if (!is_plain(tensor, 1) || tensor.scalar_type() != ScalarType::Float ||
      (num_elements != kAnyStart && tensor.numel() != num_elements)) {
    const std::string length = num_elements == kAnyStart ? "N" : text_of(num_elements);
    refuse(op, argument, text_of("contiguous float32 [", length, "]"), describe(tensor));
  }
}

// Refuses unless `tensors` are contiguous and like `weights`, one by one.
inline void check_like(const char* op, const char* argument, const std::vector<Tensor>& tensors,
                       const std::vector<Tensor>& weights) {
  if (tensors.size() != weights.size()) {
    refuse(op, argument, text_of("a list of ", weights.size(), " tensors"), text_of("a list of ", tensors.size()));
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto own = tensors[i].sizes(), expected = weights[i].sizes();
    if (!tensors[i].is_cpu() || !tensors[i].is_contiguous() || tensors[i].scalar_type() != weights[i].scalar_type() ||
        !std::equal(own.begin(), own.end(), expected.begin(), expected.end())) {
      refuse(op, argument, text_of("like weights, ", describe(weights[i])), describe(tensors[i]));
    }
  }
}

}  // namespace torchbagua::cpu
