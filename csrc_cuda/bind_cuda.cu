// The CUDA kernels of torchbagua on the dispatcher, over LibTorch's stable ABI; torchbagua/native/schema.py has the
// schemas. A call checks the types of its arguments, launches one kernel and waits for nothing: what a table holds is
// checked by the kernel, which traps.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "arguments.h"
#include "cuda/launch.h"
#include "kernels/minmax_uint8.cuh"

namespace {

namespace cuda = torchbagua::cuda;
using cuda::Launch;
using torchbagua::BFloat16;
using torchbagua::Float16;
using torchbagua::binding::check_codec;
using torchbagua::binding::check_feedback;
using torchbagua::binding::check_mean;
using torchbagua::binding::check_mean_encode;
using torchbagua::binding::DeviceType;
using torchbagua::binding::Tensor;
using torchbagua::binding::with_element_of;

constexpr DeviceType kPlace = DeviceType::CUDA;

template <typename T>
const T* read(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <typename T>
T* write(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

template <typename T>
constexpr auto* kEncode = &cuda::torchbagua_minmax_uint8_encode_float32;
template <>
constexpr auto* kEncode<BFloat16> = &cuda::torchbagua_minmax_uint8_encode_bfloat16;
template <>
constexpr auto* kEncode<Float16> = &cuda::torchbagua_minmax_uint8_encode_float16;

template <typename T>
constexpr auto* kDecode = &cuda::torchbagua_minmax_uint8_decode_float32;
template <>
constexpr auto* kDecode<BFloat16> = &cuda::torchbagua_minmax_uint8_decode_bfloat16;
template <>
constexpr auto* kDecode<Float16> = &cuda::torchbagua_minmax_uint8_decode_float16;

void encode(const Tensor& x, const Tensor& table, const Tensor& wire) {
  constexpr const char* kOp = "minmax_uint8_encode";
  check_codec(kOp, kPlace, x, table, wire);
  with_element_of(x, [&](auto element) {
    using T = decltype(element);
    cuda::run(Launch{kOp, x, table.size(0)}, kEncode<T>, read<T>(x), x.numel(), read<cuda::Block>(table), table.size(0),
              write<unsigned char>(wire), wire.numel());
  });
}

void decode(const Tensor& wire, const Tensor& table, const Tensor& x) {
  constexpr const char* kOp = "minmax_uint8_decode";
  check_codec(kOp, kPlace, x, table, wire);
  with_element_of(x, [&](auto element) {
    using T = decltype(element);
    cuda::run(Launch{kOp, x, table.size(0)}, kDecode<T>, read<unsigned char>(wire), wire.numel(),
              read<cuda::Block>(table), table.size(0), write<T>(x), x.numel());
  });
}

void decode_mean(const Tensor& rows, const Tensor& table, double divisor, const Tensor& x) {
  constexpr const char* kOp = "minmax_uint8_decode_mean";
  const float rounded = check_mean(kOp, kPlace, rows, table, divisor, x);
  cuda::run(Launch{kOp, rows, table.size(0)}, cuda::torchbagua_minmax_uint8_decode_mean, read<unsigned char>(rows),
            rows.size(0), rows.size(1), rounded, read<cuda::Block>(table), table.size(0), write<float>(x), x.numel());
}

void decode_mean_encode(const Tensor& rows, const Tensor& table, double divisor, const Tensor& wire) {
  constexpr const char* kOp = "minmax_uint8_decode_mean_encode";
  const float rounded = check_mean_encode(kOp, kPlace, rows, table, divisor, wire);
  cuda::run(Launch{kOp, rows, table.size(0)}, cuda::torchbagua_minmax_uint8_decode_mean_encode,
            read<unsigned char>(rows), rows.size(0), rows.size(1), rounded, read<cuda::Block>(table), table.size(0),
            write<unsigned char>(wire));
}

void encode_feedback(const Tensor& x, const Tensor& residual, const Tensor& table, const Tensor& wire,
                     const Tensor& left_out) {
  constexpr const char* kOp = "minmax_uint8_encode_feedback";
  check_feedback(kOp, kPlace, x, residual, table, wire, left_out);
  cuda::run(Launch{kOp, x, table.size(0)}, cuda::torchbagua_minmax_uint8_encode_feedback, read<float>(x),
            read<float>(residual), x.numel(), read<cuda::Block>(table), table.size(0), write<unsigned char>(wire),
            wire.numel(), write<float>(left_out));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchbagua, CUDA, library) {
  library.impl("minmax_uint8_encode", TORCH_BOX(&encode));
  library.impl("minmax_uint8_decode", TORCH_BOX(&decode));
  library.impl("minmax_uint8_decode_mean", TORCH_BOX(&decode_mean));
  library.impl("minmax_uint8_decode_mean_encode", TORCH_BOX(&decode_mean_encode));
  library.impl("minmax_uint8_encode_feedback", TORCH_BOX(&encode_feedback));
}
