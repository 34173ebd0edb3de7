// MinMaxUInt4 on the CPU.
#include "element/minmax_uint4.h"

#include "minmax.h"

namespace torchbagua::cpu {

TORCHBAGUA_CPU_CODEC(MinMax<MinMaxUInt4Format>)

}  // namespace torchbagua::cpu
