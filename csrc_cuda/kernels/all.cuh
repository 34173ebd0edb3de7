// All kernels: a line for each codec, for factors of low rank, and QAdam.
#pragma once

#include "blockk.cuh"
#include "low_rank.cuh"
#include "minmax_uint4.cuh"
#include "minmax_uint8.cuh"
#include "qadam.cuh"
#include "sign1bit.cuh"
#include "topk.cuh"
