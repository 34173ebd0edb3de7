// The CUDA kernels of torchbagua on the dispatcher, over LibTorch's stable ABI; torchbagua/native/schema.py has the
// schemas. A call checks the types of its arguments, launches one kernel and waits for nothing: what a table holds is
// checked by the kernel, which traps.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "arguments.h"
#include "cuda/launch.h"
#include "cuda/tensor_lists.h"
#include "kernels/minmax_uint8.cuh"
#include "kernels/qadam.cuh"

namespace {

namespace cuda = torchbagua::cuda;
using cuda::Launch;
using torchbagua::BFloat16;
using torchbagua::Float16;
using torchbagua::binding::check_codec;
using torchbagua::binding::check_feedback;
using torchbagua::binding::check_forms;
using torchbagua::binding::check_like;
using torchbagua::binding::check_mean;
using torchbagua::binding::check_mean_encode;
using torchbagua::binding::check_weights;
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

template <typename T>
constexpr auto* kUpdate = &cuda::torchbagua_qadam_update_float32;
template <>
constexpr auto* kUpdate<BFloat16> = &cuda::torchbagua_qadam_update_bfloat16;
template <>
constexpr auto* kUpdate<Float16> = &cuda::torchbagua_qadam_update_float16;

template <bool kToMomenta, typename T>
constexpr auto* kChangeForm = &cuda::torchbagua_qadam_form_momenta_float32;
template <>
constexpr auto* kChangeForm<true, BFloat16> = &cuda::torchbagua_qadam_form_momenta_bfloat16;
template <>
constexpr auto* kChangeForm<true, Float16> = &cuda::torchbagua_qadam_form_momenta_float16;
template <>
constexpr auto* kChangeForm<false, float> = &cuda::torchbagua_qadam_form_gradients_float32;
template <>
constexpr auto* kChangeForm<false, BFloat16> = &cuda::torchbagua_qadam_form_gradients_bfloat16;
template <>
constexpr auto* kChangeForm<false, Float16> = &cuda::torchbagua_qadam_form_gradients_float16;

void qadam_update(const std::vector<Tensor>& weights, const std::vector<Tensor>& gradients,
                  const std::vector<Tensor>& momenta, const std::vector<Tensor>& second_moments, double gradient_sign,
                  double weight_decay, double shrink, double beta1, double root_correction2, double eps,
                  double largest_ratio, double step_size) {
  constexpr const char* kOp = "qadam_update";
  const torchbagua::QAdamStep step = torchbagua::make_qadam_step(gradient_sign, weight_decay, shrink, beta1,
                                                                 root_correction2, eps, largest_ratio, step_size);
  check_like(kOp, "gradients", gradients, weights);
  check_like(kOp, "momenta", momenta, weights);
  check_like(kOp, "second_moments", second_moments, weights);
  check_weights(kOp, kPlace, weights);
  cuda::for_each_table<cuda::QAdamTensors>(
      weights,
      [&](auto element, size_t i) {
        using T = decltype(element);
        return cuda::QAdamTensors<T>{write<T>(weights[i]), read<T>(gradients[i]), write<T>(momenta[i]),
                                     read<T>(second_moments[i])};
      },
      [&](auto element, const auto& table, const Tensor& first) {
        cuda::run(Launch{kOp, first, table.num_chunks, cuda::kTableThreads}, kUpdate<decltype(element)>, table, step);
      });
}

// qadam_form_momenta, or qadam_form_gradients.
template <bool kToMomenta>
void qadam_change_form(const std::vector<Tensor>& values, const std::vector<Tensor>& momenta, double beta1,
                       double share) {
  constexpr const char* kOp = kToMomenta ? "qadam_form_momenta" : "qadam_form_gradients";
  check_forms(kOp, kPlace, kToMomenta ? "gradients" : "averages", values, momenta);
  cuda::for_each_table<cuda::FormTensors>(
      momenta,
      [&](auto element, size_t i) {
        return cuda::FormTensors<decltype(element)>{write<float>(values[i]), read<decltype(element)>(momenta[i])};
      },
      [&](auto element, const auto& table, const Tensor& first) {
        cuda::run(Launch{kOp, first, table.num_chunks, cuda::kTableThreads}, kChangeForm<kToMomenta, decltype(element)>,
                  table, static_cast<float>(beta1), static_cast<float>(share));
      });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchbagua, CUDA, library) {
  library.impl("minmax_uint8_encode", TORCH_BOX(&encode));
  library.impl("minmax_uint8_decode", TORCH_BOX(&decode));
  library.impl("minmax_uint8_decode_mean", TORCH_BOX(&decode_mean));
  library.impl("minmax_uint8_decode_mean_encode", TORCH_BOX(&decode_mean_encode));
  library.impl("minmax_uint8_encode_feedback", TORCH_BOX(&encode_feedback));
  library.impl("qadam_update", TORCH_BOX(&qadam_update));
  library.impl("qadam_form_momenta", TORCH_BOX(&qadam_change_form<true>));
  library.impl("qadam_form_gradients", TORCH_BOX(&qadam_change_form<false>));
}
