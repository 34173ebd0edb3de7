// All kernels: one line for each codec, for low-rank factors and for QAdam.
#pragma once

#include "blockk.cuh"
#include "low_rank.cuh"
#include "minmax_uint4.cuh"
#include "minmax_uint8.cuh"
#include "qadam.cuh"
#include "sign1bit.cuh"
#include "topk.cuh"
