// MinMaxUInt8, one element and one block header at a time; docs/arithmetic.md has the formulas.
// Every operation is one float32 operation rounded to nearest even, never a fused multiply-add:
// compile with -ffp-contract=off or --fmad=false. Freestanding, as casts.h.
#pragma once

#include "casts.h"

namespace torchbagua {

// Adding 1.5 * 2^23 to a float below 2^22 rounds it to an integer, which then stands in the low bits of the sum.
constexpr float kRoundingShift = 12582912.0f;

// A narrower range (2^-118) would need a reciprocal or a step outside the normal floats.
constexpr float kNarrowestRange = 0x1p-118f;

// What the eight header bytes of a block hold.
struct Header {
  float min;
  float max;
};

// A header unpacked for coding: code = clamp(rne((x - pivot) * inverse), lowest, lowest + 255) - lowest.
struct Coder {
  float min;
  float max;
  float pivot;
  float inverse;
  float step;
  float lowest;
};

TORCHBAGUA_ELEMENT float round_half_even(float value) { return (value + kRoundingShift) - kRoundingShift; }

// The header of a block from its extremes; NaN twice where `magnitude`, the largest in it, is unusable.
TORCHBAGUA_ELEMENT Header make_header(float min, float max, int magnitude) {
  if (magnitude >= kUnusableMagnitude) {
    return Header{not_a_number(), not_a_number()};
  }
  return Header{min + 0.0f, max + 0.0f};  // -0 becomes +0: which of the two a minimum gives is not defined
}

TORCHBAGUA_ELEMENT bool is_usable(Header header) {
  return magnitude_of(header.min) < kUnusableMagnitude && magnitude_of(header.max) < kUnusableMagnitude &&
         header.min <= header.max;
}

// Any header is accepted; one that no encoder writes gives a coder that decodes everything to NaN.
TORCHBAGUA_ELEMENT Coder make_coder(Header header) {
  if (!is_usable(header)) {
    const float nan = not_a_number();
    return Coder{nan, nan, nan, nan, nan, nan};
  }
  const float pivot = header.min > 0.0f ? header.min : (header.max < 0.0f ? header.max : 0.0f);
  const float range = header.max - header.min;
  const bool narrow = range < kNarrowestRange;
  const float inverse = narrow ? 0.0f : 255.0f / range;
  const float step = narrow ? 0.0f : range / 255.0f;
  const float lowest = round_half_even((header.max - pivot) * inverse) - 255.0f;
  return Coder{header.min, header.max + 0.0f, pivot, inverse, step, lowest};  // no -0, see dequantize_steps
}

// `value` must lie in the block that the coder's header describes, and the header be usable.
TORCHBAGUA_ELEMENT unsigned char quantize(float value, const Coder& coder) {
  // Compared and subtracted while shifted, where both are exact: the difference of the bits is the code.
  const float lowest = coder.lowest + kRoundingShift;
  const float highest = lowest + 255.0f;
  const float shifted = (value - coder.pivot) * coder.inverse + kRoundingShift;
  const float clamped = min_number(max_number(shifted, lowest), highest);
  return static_cast<unsigned char>(bits_of(clamped) - bits_of(lowest));
}

// A value from its code plus coder.lowest, which is an integer and exact however it is formed. The header must be
// usable on a GPU: then the value is a number, and it is not -0, since the pivot is not.
TORCHBAGUA_ELEMENT float dequantize_steps(float steps, const Coder& coder) {
  return min_number(max_number(coder.pivot + steps * coder.step, coder.min), coder.max);
}

TORCHBAGUA_ELEMENT float dequantize(unsigned char code, const Coder& coder) {
  return dequantize_steps(static_cast<float>(code) + coder.lowest, coder);
}

}  // namespace torchbagua
