// Sign1Bit, one element and one block header at a time; docs/arithmetic.md has the formulas and the order in which
// magnitudes are summed. Every operation is one float32 operation rounded to nearest even. Freestanding, like casts.h.
#pragma once

#include "casts.h"

namespace torchbagua {

constexpr int kSignLanes = 32;

// The values that a clear bit and a set bit of a block decode to.
template <typename Element>
struct SignedScale {
  Element positive;
  Element negative;
};

TORCHBAGUA_ELEMENT float absolute(float value) { return float_of(bits_of(value) & 0x7fffffffu); }

// All bits set for a negative value, including -0, else no bits.
TORCHBAGUA_ELEMENT unsigned int sign_mask(float value) {
  return static_cast<unsigned int>(static_cast<int>(bits_of(value)) >> 31);
}

// A scale is a mean of magnitudes: as unsigned integers, all values with the sign bit, including -0, exceed the limit.
TORCHBAGUA_ELEMENT bool is_usable(float scale) {
  return bits_of(scale) < static_cast<unsigned int>(kUnusableMagnitude);
}

// The header of a block of `length` elements from the sum of their magnitudes; NaN if the mean is not usable.
TORCHBAGUA_ELEMENT float make_scale(float sum, float length) {
  const float scale = sum / length;
  return is_usable(scale) ? scale : not_a_number();
}

// Accepts any header; a header that no encoder writes decodes to NaN.
template <typename Element>
TORCHBAGUA_ELEMENT SignedScale<Element> make_signed_scale(float scale) {
  const bool usable = is_usable(scale);
  SignedScale<Element> result;
  from_float(usable ? scale : not_a_number(), result.positive);
  from_float(usable ? -scale : not_a_number(), result.negative);
  return result;
}

}  // namespace torchbagua
