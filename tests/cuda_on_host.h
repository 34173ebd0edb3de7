// What a host's compiler lacks to take csrc_cuda/kernels/*.cuh: a kernel is then a function that does the work of one
// thread, the one whose indices stand in these variables.
#pragma once

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(max_block_threads)

struct Dim3 {
  unsigned int x, y, z;
};

extern "C" Dim3 blockIdx, threadIdx, blockDim, gridDim;
Dim3 blockIdx, threadIdx, blockDim, gridDim;
