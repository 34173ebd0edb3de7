// Selects, once, the vector instructions of the CPU kernels, and compiles a body for each instruction set.
#pragma once

#include <cstdlib>
#include <initializer_list>
#include <string_view>

#if defined(__GNUC__) && defined(__x86_64__)
#define TORCHBAGUA_X86_TARGETS 1
#else
#define TORCHBAGUA_X86_TARGETS 0
#endif

#if defined(__GNUC__)
#define TORCHBAGUA_INLINED __attribute__((always_inline))
#else
#define TORCHBAGUA_INLINED
#endif

namespace torchbagua::cpu {

enum class InstructionSet { kDefault, kAvx2, kAvx512 };

inline const char* name_of(InstructionSet set) {
  return set == InstructionSet::kAvx512 ? "avx512" : set == InstructionSet::kAvx2 ? "avx2" : "default";
}

inline InstructionSet best_of_this_cpu() {
#if TORCHBAGUA_X86_TARGETS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return InstructionSet::kAvx512;
  }
  if (__builtin_cpu_supports("avx2")) {
    return InstructionSet::kAvx2;
  }
#endif
  return InstructionSet::kDefault;
}

// ATEN_CPU_CAPABILITY, torch's own variable, lowers the choice and never raises it above the capability of the CPU.
// Torch warns about an unknown value; like torch, this function ignores it.
inline InstructionSet choose_instruction_set() {
  const InstructionSet best = best_of_this_cpu();
  const char* wanted = std::getenv("ATEN_CPU_CAPABILITY");
  for (const InstructionSet set : {InstructionSet::kDefault, InstructionSet::kAvx2}) {
    if (wanted != nullptr && std::string_view(wanted) == name_of(set)) {
      return set < best ? set : best;
    }
  }
  return best;
}

// A library that is compiled at first use contains only the instructions of its machine, which torch has detected. A
// library that is built ahead of time contains all of them, and one is chosen when it is loaded.
#if defined(TORCHBAGUA_INSTRUCTION_SET) && TORCHBAGUA_X86_TARGETS
constexpr InstructionSet kInstructionSet = InstructionSet::TORCHBAGUA_INSTRUCTION_SET;
template <InstructionSet kSet>
constexpr bool kIsCompiled = kSet == kInstructionSet;
#else
inline const InstructionSet kInstructionSet = choose_instruction_set();
template <InstructionSet kSet>
constexpr bool kIsCompiled = true;
#endif

#if TORCHBAGUA_X86_TARGETS
// The body is inlined here, so it is compiled and vectorized for the target of the function around it.
template <typename Body>
__attribute__((target("avx2"))) void run_avx2(const Body& body) {
  body();
}

template <typename Body>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))) void run_avx512(const Body& body) {
  body();
}
#endif

// Runs `body`, a lambda marked TORCHBAGUA_INLINED that calls only inlined functions, with the instructions of `set`.
template <typename Body>
void run_under(InstructionSet set, const Body& body) {
#if TORCHBAGUA_X86_TARGETS
  if constexpr (kIsCompiled<InstructionSet::kAvx512>) {
    if (set == InstructionSet::kAvx512) {
      return run_avx512(body);
    }
  }
  if constexpr (kIsCompiled<InstructionSet::kAvx2>) {
    if (set == InstructionSet::kAvx2) {
      return run_avx2(body);
    }
  }
#endif
  if constexpr (kIsCompiled<InstructionSet::kDefault>) {
    body();
  }
}

}  // namespace torchbagua::cpu
