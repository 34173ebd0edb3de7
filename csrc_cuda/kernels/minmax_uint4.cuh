// MinMaxUInt4 on CUDA: a block, 128 elements as a rule, by eight threads.
#pragma once

#include "../element/minmax_uint4.h"
#include "minmax.cuh"

namespace torchbagua::cuda {

TORCHBAGUA_MINMAX_KERNELS(minmax_uint4, MinMaxUInt4Format, 8)

}  // namespace torchbagua::cuda
