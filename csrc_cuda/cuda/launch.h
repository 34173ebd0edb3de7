// Launches a kernel on the device of its first tensor, and explains why if the launch fails.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "arguments.h"

namespace torchbagua::cuda {

// The version is in the encoding of the CUDA runtime: 13020 is 13.2.
inline std::string text_of_version(int version) { return binding::text_of(version / 1000, ".", version % 1000 / 10); }

inline std::string why_no_kernel_image() {
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  const std::string capability = binding::text_of("cuda:", device, " has compute capability ", major, ".", minor);
  if (major * 10 + minor < 75) {
    return capability + ", but the kernels need 7.5 or newer; set TORCHBAGUA_NATIVE=reference to run without them";
  }
  return capability +
         ", for which this library was not built; set TORCHBAGUA_NATIVE=nvrtc to compile the kernels for it";
}

inline std::string why_old_driver() {
  int driver = 0;
  cudaDriverGetVersion(&driver);
  return binding::text_of("the NVIDIA driver is too old: it supports CUDA ", text_of_version(driver),
                          ", but this library was built with CUDA ", text_of_version(CUDART_VERSION),
                          "; set TORCHBAGUA_NATIVE=nvrtc (kernels compiled by torch's own CUDA) or "
                          "TORCHBAGUA_NATIVE=reference (plain torch)");
}

// Raises RuntimeError if the previous launch failed.
inline void check_launch(const binding::NativeOp& operation) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) {
    return;
  }
  std::string cause = cudaGetErrorString(error);
  if (error == cudaErrorNoKernelImageForDevice) {
    cause = why_no_kernel_image();
  } else if (error == cudaErrorInsufficientDriver || error == cudaErrorUnsupportedPtxVersion) {
    cause = why_old_driver();
  }
  throw std::runtime_error(binding::text_of("torchbagua::", operation.family, "_", operation.name, ": ", cause));
}

// All kernels of the library, once it is loaded.
inline std::vector<const void*>& all_kernels() {
  static std::vector<const void*> kernels;
  return kernels;
}

template <typename... Kernels>
void add_kernels(Kernels*... kernels) {
  (all_kernels().push_back(reinterpret_cast<const void*>(kernels)), ...);
}

// The kernels loop over any rows and chunks beyond the grid.
constexpr int64_t kLargestGrid = (int64_t{1} << 31) - 1;

// Launches up to `num_blocks` thread blocks of a kernel on the device of the call's first tensor, on its current
// stream; does nothing if there are none.
template <typename... Parameters>
void launch(const binding::Call& call, int64_t num_blocks, int num_threads, void (*kernel)(Parameters...),
            const Parameters&... arguments) {
  if (num_blocks == 0) {
    return;
  }
  const int32_t device = call.first.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const auto grid = static_cast<unsigned int>(std::min(num_blocks, kLargestGrid));
  kernel<<<grid, num_threads, 0, static_cast<cudaStream_t>(stream)>>>(arguments...);
  check_launch(call);
}

}  // namespace torchbagua::cuda
