// What the kernels' bindings refuse of their arguments, in the words of torchbagua/native/schema.py: for the libraries
// of all devices, each of which says where the data has to be. What a table holds is not looked at here.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "element/casts.h"

namespace torchbagua::binding {

using torch::headeronly::DeviceType;
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

inline std::string name_of_device(const Tensor& tensor) {
  if (tensor.is_cpu()) {
    return "cpu";
  }
  return tensor.is_cuda() ? text_of("cuda:", tensor.get_device_index()) : "another device";
}

inline std::string describe(const Tensor& tensor) {
  std::string shape;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    shape += text_of(i == 0 ? "" : ", ", tensor.size(i));
  }
  return text_of(tensor.is_contiguous() ? "" : "non-contiguous ", toString(tensor.scalar_type()), " [", shape, "] on ",
                 name_of_device(tensor));
}

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

inline bool has_elements(const Tensor& tensor) {
  return with_element_of(tensor, [](auto) {});
}

inline bool is_plain(const Tensor& tensor, int64_t num_dims) {
  return tensor.dim() == num_dims && tensor.is_contiguous();
}

// Refuses unless `first`, the argument that the others must lie beside, is on a device of the type `place`. The
// dispatcher sends a call there when any of its tensors is.
inline void check_place(const char* op, const char* argument, const Tensor& first, DeviceType place) {
  if (first.device().type() != place) {
    refuse(op, argument, place == DeviceType::CPU ? "on cpu" : "on cuda", describe(first));
  }
}

// Refuses unless `tensor` is where `first` is.
inline void check_device(const char* op, const char* argument, const Tensor& tensor, const Tensor& first) {
  if (tensor.device() != first.device()) {
    refuse(op, argument, "on " + name_of_device(first), describe(tensor));
  }
}

inline void check_bytes(const char* op, const char* argument, const Tensor& tensor, int64_t num_dims) {
  if (!is_plain(tensor, num_dims) || tensor.scalar_type() != ScalarType::Byte) {
    refuse(op, argument, text_of("contiguous uint8 ", num_dims == 1 ? "[W]" : "[R, W]"), describe(tensor));
  }
}

inline void check_table_tensor(const char* op, const Tensor& table) {
  if (!is_plain(table, 2) || table.scalar_type() != ScalarType::Long || table.size(1) != 4) {
    refuse(op, "table", "contiguous int64 [B, 4]", describe(table));
  }
}

constexpr int64_t kAnyLength = -1;

// Refuses unless `tensor` is contiguous float32 [num_elements].
inline void check_floats(const char* op, const char* argument, const Tensor& tensor, int64_t num_elements) {
  if (!is_plain(tensor, 1) || tensor.scalar_type() != ScalarType::Float ||
      (num_elements != kAnyLength && tensor.numel() != num_elements)) {
    const std::string length = num_elements == kAnyLength ? "N" : text_of(num_elements);
    refuse(op, argument, text_of("contiguous float32 [", length, "]"), describe(tensor));
  }
}

// The arguments of a codec's encode and decode.
inline void check_codec(const char* op, DeviceType place, const Tensor& x, const Tensor& table, const Tensor& wire) {
  if (!is_plain(x, 1) || !has_elements(x)) {
    refuse(op, "x", "contiguous float32, bfloat16 or float16 [N]", describe(x));
  }
  check_bytes(op, "wire", wire, 1);
  check_table_tensor(op, table);
  check_device(op, "wire", wire, x);
  check_device(op, "table", table, x);
  check_place(op, "x", x, place);
}

// The arguments that a codec's means share; returns the divisor as the kernels take it.
inline float check_senders(const char* op, DeviceType place, const Tensor& rows, const Tensor& table, double divisor) {
  check_bytes(op, "rows", rows, 2);
  if (rows.size(0) < 1) {
    refuse(op, "rows", "of at least one row", describe(rows));
  }
  const float rounded = static_cast<float>(divisor);
  if (!(rounded > 0.0f && rounded <= std::numeric_limits<float>::max())) {
    refuse(op, "divisor", "a positive finite float32", text_of(divisor));
  }
  check_table_tensor(op, table);
  check_device(op, "table", table, rows);
  check_place(op, "rows", rows, place);
  return rounded;
}

// The arguments of a codec's decode_mean; returns the divisor.
inline float check_mean(const char* op, DeviceType place, const Tensor& rows, const Tensor& table, double divisor,
                        const Tensor& x) {
  const float rounded = check_senders(op, place, rows, table, divisor);
  check_floats(op, "x", x, kAnyLength);
  check_device(op, "x", x, rows);
  return rounded;
}

// The arguments of a codec's decode_mean_encode; returns the divisor.
inline float check_mean_encode(const char* op, DeviceType place, const Tensor& rows, const Tensor& table,
                               double divisor, const Tensor& wire) {
  const float rounded = check_senders(op, place, rows, table, divisor);
  check_bytes(op, "wire", wire, 1);
  if (wire.numel() != rows.size(1)) {
    refuse(op, "wire", text_of("as long as a row, ", rows.size(1), " bytes"), describe(wire));
  }
  check_device(op, "wire", wire, rows);
  return rounded;
}

// The arguments of a codec's encode_feedback.
inline void check_feedback(const char* op, DeviceType place, const Tensor& x, const Tensor& residual,
                           const Tensor& table, const Tensor& wire, const Tensor& left_out) {
  check_floats(op, "x", x, kAnyLength);
  check_floats(op, "residual", residual, x.numel());
  check_floats(op, "left_out", left_out, x.numel());
  check_bytes(op, "wire", wire, 1);
  check_table_tensor(op, table);
  check_device(op, "residual", residual, x);
  check_device(op, "left_out", left_out, x);
  check_device(op, "wire", wire, x);
  check_device(op, "table", table, x);
  check_place(op, "x", x, place);
}

// Refuses unless `tensors` are contiguous and like `weights`, one by one.
inline void check_like(const char* op, const char* argument, const std::vector<Tensor>& tensors,
                       const std::vector<Tensor>& weights) {
  if (tensors.size() != weights.size()) {
    refuse(op, argument, text_of("a list of ", weights.size(), " tensors"), text_of("a list of ", tensors.size()));
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto own = tensors[i].sizes(), expected = weights[i].sizes();
    if (!tensors[i].is_contiguous() || tensors[i].scalar_type() != weights[i].scalar_type() ||
        tensors[i].device() != weights[i].device() ||
        !std::equal(own.begin(), own.end(), expected.begin(), expected.end())) {
      refuse(op, argument, text_of("like weights, ", describe(weights[i])), describe(tensors[i]));
    }
  }
}

// The weights of qadam_update.
inline void check_weights(const char* op, DeviceType place, const std::vector<Tensor>& weights) {
  for (const Tensor& weight : weights) {
    if (!weight.is_contiguous() || !has_elements(weight)) {
      refuse(op, "weights", "contiguous float32, bfloat16 or float16", describe(weight));
    }
    check_place(op, "weights", weight, place);
  }
}

// The arguments of qadam_form_momenta and qadam_form_gradients, which call the first list `values_name`.
inline void check_forms(const char* op, DeviceType place, const char* values_name, const std::vector<Tensor>& values,
                        const std::vector<Tensor>& momenta) {
  if (momenta.size() != values.size()) {
    refuse(op, "momenta", text_of("a list of ", values.size(), " tensors"), text_of("a list of ", momenta.size()));
  }
  for (size_t i = 0; i < values.size(); ++i) {
    check_floats(op, values_name, values[i], kAnyLength);
    if (!is_plain(momenta[i], 1) || momenta[i].numel() != values[i].numel() || !has_elements(momenta[i])) {
      refuse(op, "momenta", text_of("contiguous float32, bfloat16 or float16 [", values[i].numel(), "]"),
             describe(momenta[i]));
    }
    check_device(op, "momenta", momenta[i], values[i]);
    check_place(op, values_name, values[i], place);
  }
}

}  // namespace torchbagua::binding
