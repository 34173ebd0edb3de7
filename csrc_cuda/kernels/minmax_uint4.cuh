// MinMaxUInt4 on CUDA: eight threads process one block, which usually has 128 elements.
#pragma once

#include "../element/minmax_uint4.h"
#include "minmax.cuh"

namespace torchbagua::cuda {

TORCHBAGUA_MINMAX_KERNELS(minmax_uint4, MinMaxUInt4Format, 8)

}  // namespace torchbagua::cuda
