// Registers the CPU kernels of torchbagua with the dispatcher, over LibTorch's stable ABI; torchbagua/native/ops.py has
// the schemas.

// Each included header registers its operations: to add a codec, add a line here.
#include <string>

#include "cpu/blockk.h"
#include "cpu/low_rank.h"
#include "cpu/minmax_uint4.h"
#include "cpu/minmax_uint8.h"
#include "cpu/qadam.h"
#include "cpu/ring.h"
#include "cpu/sign1bit.h"
#include "cpu/topk.h"

namespace {

std::string cpu_instruction_set() { return torchbagua::cpu::name_of(torchbagua::cpu::kInstructionSet); }

}  // namespace

// An operation without tensor arguments has no device to dispatch on.
STABLE_TORCH_LIBRARY_IMPL(torchbagua, CompositeExplicitAutograd, library) {
  library.impl("cpu_instruction_set", TORCH_BOX(&cpu_instruction_set));
}
