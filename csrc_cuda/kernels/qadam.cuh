// QAdam on CUDA: its update, and the conversions between momenta and gradients; element/qadam.h has the arithmetic.
// nvcc and NVRTC compile this file unchanged. They need --fmad=false: a fused multiply-add would round differently from
// the CPU.
#pragma once

#include "../element/qadam.h"
#include "tensor_table.cuh"
#include "vector.cuh"

namespace torchbagua::cuda {

// The limit on the size of kernel arguments.
static_assert(sizeof(TensorTable<QAdamTensors<float>>) + sizeof(QAdamStep) <= 4096, "fewer rows");

// Updates the whole vectors of a chunk; returns their number of elements.
template <typename Element>
__device__ __forceinline__ int update_vectors(const QAdamStep& step, const QAdamTensors<Element>& of, int length) {
  constexpr int kWidth = kVectorBytes / sizeof(Element);
  using V = Vector<Element, kWidth>;
  const int num_vectors = length / kWidth;
  for (int i = threadIdx.x; i < num_vectors; i += blockDim.x) {
    V& weight_place = reinterpret_cast<V*>(of.weight)[i];
    V& momentum_place = reinterpret_cast<V*>(of.momentum)[i];
    const V gradient = reinterpret_cast<const V*>(of.gradient)[i];
    const V second_moment = reinterpret_cast<const V*>(of.second_moment)[i];
    V momentum = momentum_place, weight = weight_place;
#pragma unroll  // indices known at compile time keep the four vectors in registers
    for (int k = 0; k < kWidth; ++k) {
      torchbagua::qadam_update(step, gradient.elements[k], second_moment.elements[k], momentum.elements[k],
                               weight.elements[k]);
    }
    momentum_place = momentum;
    weight_place = weight;
  }
  return num_vectors * kWidth;
}

// Run by the threads of one thread block.
template <typename Element>
__device__ __forceinline__ void update_chunk(const QAdamStep& step, const QAdamTensors<Element>& of, int length) {
  constexpr int kWidth = kVectorBytes / sizeof(Element);
  const bool vectors_fit = is_aligned<kWidth>(of.weight) && is_aligned<kWidth>(of.gradient) &&
                           is_aligned<kWidth>(of.momentum) && is_aligned<kWidth>(of.second_moment);
  const int done = vectors_fit ? update_vectors(step, of, length) : 0;
  for (int i = done + threadIdx.x; i < length; i += blockDim.x) {
    torchbagua::qadam_update(step, of.gradient[i], of.second_moment[i], of.momentum[i], of.weight[i]);
  }
}

template <typename Element>
__device__ __forceinline__ void update(const TensorTable<QAdamTensors<Element>>& table, const QAdamStep& step) {
  for_each_chunk(table, [&](const QAdamTensors<Element>& of, int length) { update_chunk(step, of, length); });
}

// Converts gradients to momenta, or averaged momenta to gradients.
template <bool kToMomenta, typename Element>
__device__ __forceinline__ float change_form(float value, Element momentum, const QAdamForm& form) {
  return kToMomenta ? form_momentum(form, value, momentum) : form_gradient(form, value, momentum);
}

template <bool kToMomenta, typename Element>
__device__ __forceinline__ void change_chunk(const FormTensors<Element>& of, int length, const QAdamForm& form) {
  constexpr int kWidth = kVectorBytes / sizeof(float);
  using Values = Vector<float, kWidth>;
  using Momenta = Vector<Element, kWidth>;
  const bool vectors_fit = is_aligned<kWidth>(of.values) && is_aligned<kWidth>(of.momentum);
  const int num_vectors = vectors_fit ? length / kWidth : 0;
  for (int i = threadIdx.x; i < num_vectors; i += blockDim.x) {
    Values& place = reinterpret_cast<Values*>(of.values)[i];
    const Momenta momenta = reinterpret_cast<const Momenta*>(of.momentum)[i];
    Values values = place;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      values.elements[k] = change_form<kToMomenta>(values.elements[k], momenta.elements[k], form);
    }
    place = values;
  }
  for (int i = num_vectors * kWidth + threadIdx.x; i < length; i += blockDim.x) {
    of.values[i] = change_form<kToMomenta>(of.values[i], of.momentum[i], form);
  }
}

template <bool kToMomenta, typename Element>
__device__ __forceinline__ void change_forms(const TensorTable<FormTensors<Element>>& table, const QAdamForm& form) {
  for_each_chunk(table,
                 [&](const FormTensors<Element>& of, int length) { change_chunk<kToMomenta>(of, length, form); });
}

// --- Kernels: extern "C" and not templates, since NVRTC's callers look up a kernel by its plain name ---

#define TORCHBAGUA_KERNEL extern "C" __global__ void __launch_bounds__(kTableThreads)
// Read directly from the launch arguments: a copy would be on the stack of every thread.
#define TORCHBAGUA_TABLE const __grid_constant__ TensorTable

TORCHBAGUA_KERNEL torchbagua_qadam_update_float32(TORCHBAGUA_TABLE<QAdamTensors<float>> table, QAdamStep step) {
  update(table, step);
}

TORCHBAGUA_KERNEL torchbagua_qadam_update_bfloat16(TORCHBAGUA_TABLE<QAdamTensors<BFloat16>> table, QAdamStep step) {
  update(table, step);
}

TORCHBAGUA_KERNEL torchbagua_qadam_update_float16(TORCHBAGUA_TABLE<QAdamTensors<Float16>> table, QAdamStep step) {
  update(table, step);
}

TORCHBAGUA_KERNEL torchbagua_qadam_form_momenta_float32(TORCHBAGUA_TABLE<FormTensors<float>> table, QAdamForm form) {
  change_forms<true>(table, form);
}

TORCHBAGUA_KERNEL torchbagua_qadam_form_momenta_bfloat16(TORCHBAGUA_TABLE<FormTensors<BFloat16>> table,
                                                         QAdamForm form) {
  change_forms<true>(table, form);
}

TORCHBAGUA_KERNEL torchbagua_qadam_form_momenta_float16(TORCHBAGUA_TABLE<FormTensors<Float16>> table, QAdamForm form) {
  change_forms<true>(table, form);
}

TORCHBAGUA_KERNEL torchbagua_qadam_form_gradients_float32(TORCHBAGUA_TABLE<FormTensors<float>> table, QAdamForm form) {
  change_forms<false>(table, form);
}

TORCHBAGUA_KERNEL torchbagua_qadam_form_gradients_bfloat16(TORCHBAGUA_TABLE<FormTensors<BFloat16>> table,
                                                           QAdamForm form) {
  change_forms<false>(table, form);
}

TORCHBAGUA_KERNEL torchbagua_qadam_form_gradients_float16(TORCHBAGUA_TABLE<FormTensors<Float16>> table,
                                                          QAdamForm form) {
  change_forms<false>(table, form);
}

#undef TORCHBAGUA_TABLE
#undef TORCHBAGUA_KERNEL

}  // namespace torchbagua::cuda
