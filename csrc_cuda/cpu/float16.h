// Conversion between float16 and float32 on the CPU, by the instructions of every processor with AVX2; without them, a
// conversion takes a dozen instructions. They round to nearest even and preserve subnormals, like element/casts.h.
#pragma once

#include "blocks.h"

#if TORCHBAGUA_X86_TARGETS
#include <immintrin.h>
#endif

namespace torchbagua::cpu {

constexpr long long kConverted = 16;  // the elements of the widest instruction
constexpr long long kMostConverted = 2 * kPart;

#if TORCHBAGUA_X86_TARGETS
// These convert a multiple of kConverted elements. Widened values are loaded again immediately, by the widest
// instructions: a load waits for the stores before it unless a single store contains all of its bytes.
__attribute__((target("avx,f16c"))) inline void widen_avx2(const Float16* from, long long length, float* to) {
  for (long long i = 0; i < length; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
}

__attribute__((target("avx512f"))) inline void widen_avx512(const Float16* from, long long length, float* to) {
  for (long long i = 0; i < length; i += 16) {
    // With a mask of all elements: without a mask, g++ warns about an uninitialized register.
    const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    _mm512_storeu_ps(to + i, _mm512_maskz_cvtph_ps(0xffff, narrow));
  }
}

__attribute__((target("avx,f16c"))) inline void narrow_avx2(const float* from, long long length, Float16* to) {
  for (long long i = 0; i < length; i += 8) {
    const __m128i narrowed = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), narrowed);
  }
}
#endif

// Calls `use` with the elements, at most kMostConverted, in a type that vector instructions load fast.
template <typename T, typename Use>
TORCHBAGUA_ELEMENT void with_fast_elements(const T* values, long long length, const Use& use) {
#if TORCHBAGUA_X86_TARGETS
  if constexpr (std::is_same_v<T, Float16>) {
    if (kInstructionSet != InstructionSet::kDefault) {
      alignas(64) float part[kMostConverted];
      const long long most = length / kConverted * kConverted;
      (kInstructionSet == InstructionSet::kAvx512 ? widen_avx512 : widen_avx2)(values, most, part);
      for (long long i = most; i < length; ++i) {
        part[i] = to_float(values[i]);
      }
      use(static_cast<const float*>(part));
      return;
    }
  }
#endif
  use(values);
}

// Calls `fill` with the destination of up to kMostConverted floats, which must not be NaN and become the elements:
// either `values` itself, or a buffer that is then converted.
template <typename T, typename Fill>
TORCHBAGUA_ELEMENT void fill_numbers(T* values, long long length, const Fill& fill) {
#if TORCHBAGUA_X86_TARGETS
  if constexpr (std::is_same_v<T, Float16>) {
    if (kInstructionSet != InstructionSet::kDefault) {
      alignas(64) float part[kMostConverted];
      fill(static_cast<float*>(part));
      const long long most = length / kConverted * kConverted;
      narrow_avx2(part, most, values);
      for (long long i = most; i < length; ++i) {
        from_number(part[i], values[i]);
      }
      return;
    }
  }
#endif
  fill(values);
}

}  // namespace torchbagua::cpu
