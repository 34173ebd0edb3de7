// MinMaxUInt8 on CUDA: all threads of a thread block process one block.
#pragma once

#include "../element/minmax_uint8.h"
#include "minmax.cuh"

namespace torchbagua::cuda {

TORCHBAGUA_MINMAX_KERNELS(minmax_uint8, MinMaxUInt8Format, kThreads)

}  // namespace torchbagua::cuda
