// Sign1Bit, one element and one block header at a time; docs/arithmetic.md has the formulas, and the order in which
// magnitudes are added. Every operation is one float32 operation rounded to nearest even. Freestanding, as casts.h.
#pragma once

#include "casts.h"

namespace torchbagua {

constexpr int kSignLanes = 32;

// What a clear and a set bit of a block decode to.
template <typename Element>
struct SignedScale {
  Element positive;
  Element negative;
};

TORCHBAGUA_ELEMENT float absolute(float value) { return float_of(bits_of(value) & 0x7fffffffu); }

// All bits set for a negative value, -0 too, else none.
TORCHBAGUA_ELEMENT unsigned int sign_mask(float value) {
  return static_cast<unsigned int>(static_cast<int>(bits_of(value)) >> 31);
}

// A scale is a mean of magnitudes: as an unsigned number all that has the sign bit, -0 too, lies above the limit.
TORCHBAGUA_ELEMENT bool is_usable(float scale) {
  return bits_of(scale) < static_cast<unsigned int>(kUnusableMagnitude);
}

// The header of a block of `length` elements from the sum of their magnitudes; NaN where that has no usable mean.
TORCHBAGUA_ELEMENT float make_scale(float sum, float length) {
  const float scale = sum / length;
  return is_usable(scale) ? scale : not_a_number();
}

// Any header is accepted; one that no encoder writes decodes to NaN.
template <typename Element>
TORCHBAGUA_ELEMENT SignedScale<Element> make_signed_scale(float scale) {
  const bool usable = is_usable(scale);
  SignedScale<Element> result;
  from_float(usable ? scale : not_a_number(), result.positive);
  from_float(usable ? -scale : not_a_number(), result.negative);
  return result;
}

}  // namespace torchbagua
