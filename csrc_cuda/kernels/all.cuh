// All kernels: a line for each codec, and QAdam.
#pragma once

#include "minmax_uint8.cuh"
#include "qadam.cuh"
