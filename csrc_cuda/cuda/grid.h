// How large a launch over a block table is. native/launcher.py has the same rule in Python.
#pragma once

#include <algorithm>

namespace torchbagua::cuda {

// The thread blocks for a table of `num_blocks` rows over a wire of `wire_bytes`; `tile` and `warps` are the kernels'.
// Where blocks are longer than two tiles on average each has a thread block of its own, else each has one warp.
// A grid has at most 2^31 - 1 thread blocks: the kernels go on to further rows.
inline long long num_thread_blocks(long long num_blocks, long long wire_bytes, long long tile, long long warps) {
  const bool are_long = wire_bytes > 2 * tile * num_blocks;
  const long long wanted = are_long ? num_blocks : (num_blocks + warps - 1) / warps;
  return std::min(wanted, (1LL << 31) - 1);
}

}  // namespace torchbagua::cuda
