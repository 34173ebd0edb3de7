// Registers the CUDA kernels of torchbagua with the dispatcher, over LibTorch's stable ABI; torchbagua/native/ops.py
// has the schemas.

// First, because it defines the macro in the last line of a codec's kernels.
#include "cuda/codec.h"
// Then the kernels, and the launchers of the kernels that belong to no codec.
#include "cuda/low_rank.h"
#include "cuda/qadam.h"
#include "kernels/all.cuh"
