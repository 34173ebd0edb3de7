// QAdam's update on CUDA: one launch updates many tensors of one element type; element/qadam.h has the arithmetic.
// nvcc and NVRTC compile this file as it is. They need --fmad=false: a fused multiply-add would round otherwise than
// the CPU does.
#pragma once

#include "../element/qadam.h"
#include "vector.cuh"

namespace torchbagua::cuda {

constexpr int kMaxBlockThreads = 256;

// The four tensors of one parameter, `num_elements` each. A launch reads a table of these in the device's memory.
template <typename Element>
struct QAdamTensors {
  Element* weight;
  const Element* gradient;
  Element* momentum;
  const Element* second_moment;
  long long num_elements;
  long long first_chunk;  // how many chunks the tensors before this one have
};

// What a launch works through. The tensors are cut into chunks of `chunk_elements`, the last of each tensor may be
// shorter, and an empty tensor has none: so small and large tensors share the blocks evenly.
template <typename Element>
struct QAdamLaunch {
  const QAdamTensors<Element>* tensors;
  long long num_chunks;
  int num_tensors;
  int chunk_elements;  // at most 2^30; a multiple of 8 leaves the chunks of aligned tensors aligned
};

// Adds to a pointer in 64 bits, for tensors of more than 2^31 elements; within a chunk 32 are enough, and faster.
template <typename Element>
__device__ __forceinline__ QAdamTensors<Element> skip(QAdamTensors<Element> tensors, long long num_elements) {
  tensors.weight += num_elements;
  tensors.gradient += num_elements;
  tensors.momentum += num_elements;
  tensors.second_moment += num_elements;
  tensors.num_elements -= num_elements;
  return tensors;
}

// The whole vectors of a chunk; returns how many elements they are.
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
#pragma unroll  // indices known to the compiler keep the four vectors in registers
    for (int k = 0; k < kWidth; ++k) {
      torchbagua::qadam_update(step, gradient.elements[k], second_moment.elements[k], momentum.elements[k],
                               weight.elements[k]);
    }
    momentum_place = momentum;
    weight_place = weight;
  }
  return num_vectors * kWidth;
}

// By the threads of one block.
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

// The tensor that `chunk` is of: the last that begins no later. (An empty one begins where the next does.)
template <typename Element>
__device__ __forceinline__ const QAdamTensors<Element>& tensors_of(const QAdamLaunch<Element>& launch,
                                                                   long long chunk) {
  int first = 0, last = launch.num_tensors - 1;
  while (first < last) {
    const int middle = last - (last - first) / 2;
    if (launch.tensors[middle].first_chunk <= chunk) {
      first = middle;
    } else {
      last = middle - 1;
    }
  }
  return launch.tensors[first];
}

// Any number of blocks, of up to kMaxBlockThreads threads, does.
template <typename Element>
__device__ __forceinline__ void qadam_update(const QAdamLaunch<Element>& launch, const QAdamStep& step) {
  for (long long chunk = blockIdx.x; chunk < launch.num_chunks; chunk += gridDim.x) {
    const QAdamTensors<Element>& tensors = tensors_of(launch, chunk);
    const long long begin = (chunk - tensors.first_chunk) * launch.chunk_elements;
    const QAdamTensors<Element> rest = skip(tensors, begin);
    const bool is_whole = rest.num_elements >= launch.chunk_elements;
    update_chunk(step, rest, is_whole ? launch.chunk_elements : static_cast<int>(rest.num_elements));
  }
}

// "C" and no templates: NVRTC's callers find a kernel by its plain name.
extern "C" __global__ void __launch_bounds__(kMaxBlockThreads)
    torchbagua_qadam_update_float32(QAdamLaunch<float> launch, QAdamStep step) {
  qadam_update(launch, step);
}

extern "C" __global__ void __launch_bounds__(kMaxBlockThreads)
    torchbagua_qadam_update_bfloat16(QAdamLaunch<BFloat16> launch, QAdamStep step) {
  qadam_update(launch, step);
}

extern "C" __global__ void __launch_bounds__(kMaxBlockThreads)
    torchbagua_qadam_update_float16(QAdamLaunch<Float16> launch, QAdamStep step) {
  qadam_update(launch, step);
}

}  // namespace torchbagua::cuda
