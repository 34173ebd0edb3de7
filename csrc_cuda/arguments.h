// Converts tensors to the form that kernels take, or rejects them: these checks keep a kernel inside its tensors, and
// have the same messages as torchbagua/native/ops.py. The content of a table is not checked here.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "element/blocks.h"

namespace torchbagua::binding {

using torch::headeronly::DeviceType;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// `torchbagua::<family>_<name>`.
struct NativeOp {
  const char* family;
  const char* name;
};

// A call of an operation: the device type of its library, and its first tensor, which determines the device.
struct Call : NativeOp {
  DeviceType place;
  const Tensor& first;
};

// Without streams: a compiler that has no shared libstdc++ links the static one, whose streams crash if torch has
// loaded another.
inline std::string text_of_part(const std::string& part) { return part; }
inline std::string text_of_part(const char* part) { return part; }
inline std::string text_of_part(double part) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", part);
  return text;
}
template <typename Integer, std::enable_if_t<std::is_integral_v<Integer>, int> = 0>
std::string text_of_part(Integer part) {
  return std::to_string(part);
}

template <typename... Parts>
std::string text_of(const Parts&... parts) {
  return (std::string() + ... + text_of_part(parts));
}

// Python sees std::invalid_argument as a ValueError.
[[noreturn]] inline void refuse(const NativeOp& operation, const char* argument, const std::string& allowed,
                                const std::string& got) {
  throw std::invalid_argument(text_of("torchbagua::", operation.family, "_", operation.name, ": ", argument,
                                      " must be ", allowed, ", got ", got));
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

// The required size of a dimension, or its name if any size is allowed.
struct Size {
  const char* name;
  int64_t value = -1;
};

struct Argument {
  const char* name;
  const Tensor& tensor;
  int64_t size = -1;  // the required size of its first dimension, if any
};

constexpr const char* kElementTypes = "float32, bfloat16 or float16";

inline bool has_elements(const Tensor& tensor) {
  const ScalarType type = tensor.scalar_type();
  return type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half;
}

// Rejects a tensor unless it has one of the `types`, is contiguous, has the shape (any shape if none is given), and is
// on the device of the call's first tensor, which must be of the library's device type.
inline void check(const Call& call, const Argument& argument, bool has_type, const char* types,
                  std::initializer_list<Size> shape) {
  const Tensor& tensor = argument.tensor;
  const bool is_there = tensor.device() == call.first.device() && tensor.device().type() == call.place;
  const auto own = tensor.sizes();
  const bool has_shape = shape.size() == 0 || std::equal(shape.begin(), shape.end(), own.begin(), own.end(),
                                                         [](const Size& allowed, int64_t size) {
                                                           return allowed.value < 0 || allowed.value == size;
                                                         });
  if (has_type && is_there && has_shape && tensor.is_contiguous()) {
    return;
  }
  std::string sizes;
  for (const Size& allowed : shape) {
    sizes += sizes.empty() ? "" : ", ";
    sizes += allowed.value < 0 ? allowed.name : std::to_string(allowed.value);
  }
  const bool first_is_there = call.first.device().type() == call.place;
  const std::string place = first_is_there                  ? name_of_device(call.first)
                            : call.place == DeviceType::CPU ? "cpu"
                                                            : "cuda";
  refuse(call, argument.name, text_of("contiguous ", types, sizes.empty() ? "" : " [" + sizes + "]", " on ", place),
         describe(tensor));
}

// Calls `body` with a value of a type that `has_elements` accepts.
template <typename Body>
void with_element_type(ScalarType type, const Body& body) {
  switch (type) {
    case ScalarType::BFloat16:
      return body(BFloat16{});
    case ScalarType::Half:
      return body(Float16{});
    default:
      return body(float{});
  }
}

// Calls `body` with a value of the argument's element type, which must be one that the codecs encode.
template <typename Body>
void with_element_of(const Call& call, const Argument& argument, const Body& body) {
  check(call, argument, has_elements(argument.tensor), kElementTypes, {{"N", argument.size}});
  with_element_type(argument.tensor.scalar_type(), body);
}

template <typename T>
constexpr ScalarType kTypeOf = ScalarType::Float;
template <>
inline constexpr ScalarType kTypeOf<BFloat16> = ScalarType::BFloat16;
template <>
inline constexpr ScalarType kTypeOf<Float16> = ScalarType::Half;
template <>
inline constexpr ScalarType kTypeOf<unsigned char> = ScalarType::Byte;

template <typename T>
Span<T> span_of(const Call& call, const Argument& argument) {
  constexpr ScalarType kType = kTypeOf<std::remove_const_t<T>>;
  constexpr bool kIsBytes = kType == ScalarType::Byte;
  const Tensor& tensor = argument.tensor;
  check(call, argument, tensor.scalar_type() == kType, kIsBytes ? "uint8" : "float32",
        {{kIsBytes ? "W" : "N", argument.size}});
  if constexpr (std::is_const_v<T>) {
    return {static_cast<T*>(tensor.const_data_ptr()), tensor.numel()};
  } else {
    return {static_cast<T*>(tensor.mutable_data_ptr()), tensor.numel()};
  }
}

inline Rows rows_of(const Call& call, const Tensor& rows) {
  check(call, {"rows", rows}, rows.scalar_type() == ScalarType::Byte, "uint8", {{"R"}, {"W"}});
  if (rows.size(0) < 1) {
    refuse(call, "rows", "a tensor of at least one row", describe(rows));
  }
  return {static_cast<const unsigned char*>(rows.const_data_ptr()), rows.size(0), rows.size(1)};
}

// Converts the divisor to float32, as the kernels take it.
inline float divisor_of(const Call& call, double divisor) {
  const float rounded = static_cast<float>(divisor);
  if (!(rounded > 0.0f && rounded <= std::numeric_limits<float>::max())) {
    refuse(call, "divisor", "a positive finite float32", text_of(divisor));
  }
  return rounded;
}

inline Table table_of(const Call& call, const Tensor& table, int64_t num_fields) {
  check(call, {"table", table}, table.scalar_type() == ScalarType::Long, "int64", {{"B"}, {nullptr, num_fields}});
  return {static_cast<const Block*>(table.const_data_ptr()), table.size(0), table.size(1)};
}

}  // namespace torchbagua::binding
