// `cpu_instruction_set`, which tells Python which kernels run.
#include "instruction_set.h"

#include <torch/csrc/stable/library.h>

#include <string>

namespace {

std::string cpu_instruction_set() { return torchbagua::cpu::name_of(torchbagua::cpu::kInstructionSet); }

}  // namespace

// An operation without tensor arguments has no device to dispatch on.
STABLE_TORCH_LIBRARY_IMPL(torchbagua, CompositeExplicitAutograd, library) {
  library.impl("cpu_instruction_set", TORCH_BOX(&cpu_instruction_set));
}
