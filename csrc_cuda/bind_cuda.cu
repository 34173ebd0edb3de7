// Registers the CUDA kernels of torchbagua with the dispatcher, over LibTorch's stable ABI; torchbagua/native/ops.py
// has the schemas.

// First, because it defines the macro in the last line of a codec's kernels.
#include "cuda/codec.h"
// Then the kernels, and the launchers of the kernels that belong to no codec.
#include "cuda/low_rank.h"
#include "cuda/qadam.h"
#include "kernels/all.cuh"

// Loads all kernels on a device, and returns their number. Otherwise CUDA loads each at its first launch, which may
// wait for all work on the GPU: also for an NCCL operation that waits for another rank in the same situation.
extern "C" __attribute__((visibility("default"))) int torchbagua_load_kernels(int device) {
  using namespace torchbagua::cuda;
  const torch::stable::accelerator::DeviceGuard guard(device);
  for (const void* kernel : all_kernels()) {
    cudaFuncAttributes attributes;
    cudaFuncGetAttributes(&attributes, kernel);
  }
  cudaGetLastError();  // on a GPU for which there are no kernels, the first launch raises an error that explains it
  return static_cast<int>(all_kernels().size());
}
