// A CUDA runtime that hands every launch to whoever has asked for it, and torch's word that CPU tensors are on a GPU:
// linked with bind_cuda.cu they show what it launches where there is no GPU.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>

namespace {

dim3 grid_of_call, threads_of_call;
size_t shared_of_call;
cudaStream_t stream_of_call;

// The kernels' names, by the address of the function that stands for them.
std::map<const void*, std::string>& names() {
  static std::map<const void*, std::string> map;
  return map;
}

std::set<std::string>& loaded() {
  static std::set<std::string> set;
  return set;
}

}  // namespace

extern "C" {

// Called with a kernel's name, the lengths of grid and thread block, its arguments' addresses and the stream.
void (*pretended_launch)(const char*, unsigned int, unsigned int, void**, void*);
int pretended_error = cudaSuccess;
int pretended_capability = 90;
int pretended_device = -1;  // that the guard has made current

void** __cudaRegisterFatBinary(void* binary) { return new void*(binary); }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 0; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, dim3*, dim3*,
                            int*) {
  names()[function] = name;
}

unsigned int __cudaPushCallConfiguration(dim3 grid, dim3 threads, size_t shared, cudaStream_t stream) {
  grid_of_call = grid;
  threads_of_call = threads;
  shared_of_call = shared;
  stream_of_call = stream;
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* threads, size_t* shared, void* stream) {
  *grid = grid_of_call;
  *threads = threads_of_call;
  *shared = shared_of_call;
  *static_cast<cudaStream_t*>(stream) = stream_of_call;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 threads, void** arguments, size_t,
                             cudaStream_t stream) {
  pretended_launch(names().at(function).c_str(), grid.x, threads.x, arguments, stream);
  return cudaSuccess;
}

// From CUDA 13 on a kernel has a handle.
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 threads, void** arguments, size_t shared,
                               cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, threads, arguments, shared, stream);
}

// Loads a kernel.
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void* function) {
  loaded().insert(names().at(function));
  return cudaSuccess;
}
int pretended_num_kernels() { return static_cast<int>(names().size()); }
int pretended_num_loaded() { return static_cast<int>(loaded().size()); }

cudaError_t cudaGetLastError() { return static_cast<cudaError_t>(pretended_error); }
const char* cudaGetErrorString(cudaError_t) { return "some error of CUDA"; }

cudaError_t cudaDriverGetVersion(int* version) {
  *version = 11080;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = pretended_device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? pretended_capability / 10 : pretended_capability % 10;
  return cudaSuccess;
}

// Of torch.
int32_t aoti_torch_device_type_cuda();
int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_get_device_type(void* tensor, int32_t* type) {
  const auto of_torch = reinterpret_cast<int32_t (*)(void*, int32_t*)>(dlsym(RTLD_NEXT, "aoti_torch_get_device_type"));
  const int32_t error = of_torch(tensor, type);
  *type = *type == aoti_torch_device_type_cpu() ? aoti_torch_device_type_cuda() : *type;
  return error;
}
int32_t aoti_torch_get_device_index(void*, int32_t* index) {
  *index = 0;
  return 0;
}
int32_t aoti_torch_create_device_guard(int32_t device, void** guard) {
  *guard = &pretended_device;
  pretended_device = device;
  return 0;
}
int32_t aoti_torch_delete_device_guard(void*) {
  pretended_device = -1;
  return 0;
}
int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  *stream = reinterpret_cast<void*>(static_cast<intptr_t>(1000 + device));
  return 0;
}
}
