// The CUDA kernels of torchbagua on the dispatcher, over LibTorch's stable ABI; torchbagua/native/ops.py has the
// schemas.

// First: it says what the last line of a codec's kernels does.
#include "cuda/codec.h"
// Then the kernels, and what launches those that are no codec's.
#include "cuda/low_rank.h"
#include "cuda/qadam.h"
#include "kernels/all.cuh"
