// Bits of a float, and bfloat16 and float16 to and from it, rounded to nearest even.
// Freestanding: g++, nvcc and NVRTC compile this header and nothing else, and all give the same bits.
#pragma once

#if defined(__CUDACC__)
#define TORCHBAGUA_ELEMENT __host__ __device__ __forceinline__
#elif defined(_MSC_VER)
#define TORCHBAGUA_ELEMENT __forceinline
#else
#define TORCHBAGUA_ELEMENT inline __attribute__((always_inline))
#endif

namespace torchbagua {

// A type of its own for each storage format, so that overloads tell them apart.
struct BFloat16 {
  unsigned short bits;
};
struct Float16 {
  unsigned short bits;
};

// g++ defines that the other member can be read, nvcc and NVRTC do the same; NVRTC has no <cstring> for a memcpy.
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

// |value| as an integer that orders as the magnitude does, with Inf and then NaN on top.
TORCHBAGUA_ELEMENT int magnitude_of(float value) { return static_cast<int>(bits_of(value) & 0x7fffffffu); }

TORCHBAGUA_ELEMENT float not_a_number() { return float_of(0x7fc00000u); }

// Bits of 2^126, from which on the codecs take no magnitude: a difference of two floats below it is finite. NaN and Inf
// lie above it.
constexpr int kUnusableMagnitude = 0x7e800000;

// Of NaN and a number, the first argument.
TORCHBAGUA_ELEMENT float smaller(float a, float b) { return b < a ? b : a; }
TORCHBAGUA_ELEMENT float larger(float a, float b) { return b > a ? b : a; }

// The same where the first argument is a number, and the two are not zeros of opposite sign: one instruction on a GPU.
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

// Whether a quotient by a power of two is the product with its reciprocal, to the bit: both round the same number.
TORCHBAGUA_ELEMENT bool has_exact_reciprocal(float divisor) {
  const unsigned int exponent = bits_of(divisor) >> 23;
  return (bits_of(divisor) & 0x007fffffu) == 0 && 0 < exponent && exponent < 254;
}

// For values that come of a float operation: g++ makes that conditional in `condition ? a : b`, and as it might trap
// the loop around it is not vectorised.
TORCHBAGUA_ELEMENT unsigned int select(bool condition, unsigned int a, unsigned int b) {
  const unsigned int mask = 0u - static_cast<unsigned int>(condition);
  return (a & mask) | (b & ~mask);
}

TORCHBAGUA_ELEMENT float to_float(float value) { return value; }

TORCHBAGUA_ELEMENT float to_float(BFloat16 value) { return float_of(static_cast<unsigned int>(value.bits) << 16); }

TORCHBAGUA_ELEMENT float to_float(Float16 value) {
  const unsigned int sign = (value.bits & 0x8000u) << 16;
  const unsigned int shifted = (value.bits & 0x7fffu) << 13;  // exponent and fraction at a float's place
  const unsigned int exponent = shifted & 0x0f800000u;
  const float subnormal = float_of(shifted + 0x38800000u) - float_of(0x38800000u);  // exact: k * 2^-24
  const unsigned int rebias = exponent == 0x0f800000u ? 0x70000000u : 0x38000000u;  // Inf and NaN, or 127 - 15
  return float_of(sign | select(exponent == 0, bits_of(subnormal), shifted + rebias));
}

// Of a value that is a number: NaN has a pattern of its own, which from_float gives.
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
  // The unit in the last place of 0.5 is 2^-24, that of a subnormal: the addition rounds.
  const unsigned int subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  unsigned int result = select(magnitude < 0x38800000u, subnormal, rounded);  // 2^-14, the smallest normal
  result = select(magnitude >= 0x47800000u, 0x7c00u, result);                 // 2^16 and more: Inf
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
