// All kernels, for NVRTC.
#pragma once

#include "minmax_uint8.cuh"
#include "qadam.cuh"
