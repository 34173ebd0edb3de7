// The bits of a float, and conversions from and to bfloat16 and float16, rounded to nearest even.
// Freestanding: g++, nvcc and NVRTC compile this header without any other, with bitwise equal results.
#pragma once

#if defined(__CUDACC__)
#define TORCHBAGUA_ELEMENT __host__ __device__ __forceinline__
#elif defined(_MSC_VER)
#define TORCHBAGUA_ELEMENT __forceinline
#else
#define TORCHBAGUA_ELEMENT inline __attribute__((always_inline))
#endif

namespace torchbagua {

// Distinct types for the storage formats, so that overloads can distinguish them.
struct BFloat16 {
  unsigned short bits;
};
struct Float16 {
  unsigned short bits;
};

// g++ defines reading the other member, and nvcc and NVRTC behave the same; NVRTC has no <cstring> for memcpy.
union FloatBits {
  float value;
  unsigned int bits;
};

TORCHBAGUA_ELEMENT unsigned int bits_of(float value) {
  FloatBits cast;
  cast.value = value;
  return cast.bits;
}

TORCHBAGUA_ELEMENT float float_of(unsigned int bits) {
  FloatBits cast;
  cast.bits = bits;
  return cast.value;
}

// |value| as an integer in the order of the magnitudes, with Inf and then NaN on top.
TORCHBAGUA_ELEMENT int magnitude_of(float value) { return static_cast<int>(bits_of(value) & 0x7fffffffu); }

TORCHBAGUA_ELEMENT float not_a_number() { return float_of(0x7fc00000u); }

// Bits of 2^126. The codecs reject magnitudes from 2^126 on, since the difference of two floats below 2^126 is finite.
// NaN and Inf are above it.
constexpr int kUnusableMagnitude = 0x7e800000;

// If one argument is NaN, these return the first argument.
TORCHBAGUA_ELEMENT float smaller(float a, float b) { return b < a ? b : a; }
TORCHBAGUA_ELEMENT float larger(float a, float b) { return b > a ? b : a; }

// The same if the first argument is a number and the two are not zeros of opposite sign: one instruction on a GPU.
TORCHBAGUA_ELEMENT float min_number(float a, float b) {
#if defined(__CUDA_ARCH__)
  return fminf(a, b);
#else
  return smaller(a, b);
#endif
}

TORCHBAGUA_ELEMENT float max_number(float a, float b) {
#if defined(__CUDA_ARCH__)
  return fmaxf(a, b);
#else
  return larger(a, b);
#endif
}

// Whether division by `divisor` is bitwise equal to multiplication by its reciprocal, as for a power of two: both round
// the same number.
TORCHBAGUA_ELEMENT bool has_exact_reciprocal(float divisor) {
  const unsigned int exponent = bits_of(divisor) >> 23;
  return (bits_of(divisor) & 0x007fffffu) == 0 && 0 < exponent && exponent < 254;
}

// A branch-free `condition ? a : b` for results of float operations: g++ would make the operation conditional, and
// since it might trap, the surrounding loop would not be vectorized.
TORCHBAGUA_ELEMENT unsigned int select(bool condition, unsigned int a, unsigned int b) {
  const unsigned int mask = 0u - static_cast<unsigned int>(condition);
  return (a & mask) | (b & ~mask);
}

TORCHBAGUA_ELEMENT float to_float(float value) { return value; }

TORCHBAGUA_ELEMENT float to_float(BFloat16 value) { return float_of(static_cast<unsigned int>(value.bits) << 16); }

TORCHBAGUA_ELEMENT float to_float(Float16 value) {
  const unsigned int sign = (value.bits & 0x8000u) << 16;
  const unsigned int shifted = (value.bits & 0x7fffu) << 13;  // exponent and fraction in a float's position
  const unsigned int exponent = shifted & 0x0f800000u;
  const float subnormal = float_of(shifted + 0x38800000u) - float_of(0x38800000u);  // exact: k * 2^-24
  const unsigned int rebias = exponent == 0x0f800000u ? 0x70000000u : 0x38000000u;  // Inf and NaN, or 127 - 15
  return float_of(sign | select(exponent == 0, bits_of(subnormal), shifted + rebias));
}

// For values that are not NaN: from_float also handles NaN, with its fixed bit pattern.
TORCHBAGUA_ELEMENT void from_number(float value, float& out) { out = value; }

TORCHBAGUA_ELEMENT void from_number(float value, BFloat16& out) {
  const unsigned int bits = bits_of(value);
  out.bits = static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

TORCHBAGUA_ELEMENT void from_number(float value, Float16& out) {
  const unsigned int bits = bits_of(value);
  const unsigned int sign = (bits >> 16) & 0x8000u;
  const unsigned int magnitude = bits & 0x7fffffffu;
  const unsigned int rounded = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // The ulp of 0.5 is 2^-24, as of a subnormal float16: the addition rounds.
  const unsigned int subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  unsigned int result = select(magnitude < 0x38800000u, subnormal, rounded);  // 2^-14, the smallest normal
  result = select(magnitude >= 0x47800000u, 0x7c00u, result);                 // from 2^16 on: Inf
  out.bits = static_cast<unsigned short>(sign | result);
}

TORCHBAGUA_ELEMENT bool is_nan(unsigned int bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

TORCHBAGUA_ELEMENT void from_float(float value, float& out) { out = value; }

TORCHBAGUA_ELEMENT void from_float(float value, BFloat16& out) {
  BFloat16 rounded;
  from_number(value, rounded);
  out.bits = static_cast<unsigned short>(is_nan(bits_of(value)) ? 0x7fc0u : rounded.bits);
}

TORCHBAGUA_ELEMENT void from_float(float value, Float16& out) {
  Float16 rounded;
  from_number(value, rounded);
  out.bits =
      static_cast<unsigned short>(select(is_nan(bits_of(value)), (rounded.bits & 0x8000u) | 0x7e00u, rounded.bits));
}

}  // namespace torchbagua
