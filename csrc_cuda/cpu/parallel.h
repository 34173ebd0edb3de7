// Loops over elements on several threads, with the selected instruction set.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "instruction_set.h"

namespace torchbagua::cpu {

// Calls `body(begin, end)`, a lambda marked TORCHBAGUA_INLINED, on several threads. Each thread takes at least kGrain
// elements: fewer are not worth waking a thread.
template <typename Body>
void in_parallel(int64_t num_elements, const Body& body) {
  constexpr int64_t kGrain = 1 << 15;
  torch::stable::parallel_for(0, num_elements, kGrain, [&](int64_t begin, int64_t end) {
    run_under(kInstructionSet, [&]() TORCHBAGUA_INLINED { body(begin, end); });
  });
}

}  // namespace torchbagua::cpu
