// MinMaxUInt8 on the CPU.
#include "element/minmax_uint8.h"

#include "minmax.h"

namespace torchbagua::cpu {

TORCHBAGUA_CPU_CODEC(MinMax<MinMaxUInt8Format>)

}  // namespace torchbagua::cpu
