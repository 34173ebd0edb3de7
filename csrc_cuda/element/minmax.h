// The min-max codecs, one element and one block header at a time; docs/arithmetic.md has the formulas. Their
// differences are in a format: minmax_uint8.h, minmax_uint4.h. Every operation is one float32 operation rounded to
// nearest even, never a fused multiply-add: compile with -ffp-contract=off or --fmad=false. Freestanding, like casts.h.
#pragma once

#include "casts.h"

namespace torchbagua {

// Adding 1.5 * 2^23 to a float below 2^22 rounds it to an integer, which is then in the low bits of the sum.
constexpr float kRoundingShift = 12582912.0f;

// A narrower range (2^-118) would need a reciprocal or a step outside the normal floats.
constexpr float kNarrowestRange = 0x1p-118f;

// The range in the header of a block.
struct Range {
  float min;
  float max;
};

// A range unpacked for coding: code = clamp(rne((x - pivot) * inverse), lowest, lowest + steps) - lowest.
struct Coder {
  float min;
  float max;
  float pivot;
  float inverse;
  float step;
  float lowest;
};

TORCHBAGUA_ELEMENT float round_half_even(float value) { return (value + kRoundingShift) - kRoundingShift; }

// The range for the header of a block, from the extremes of the block; (NaN, NaN) if `magnitude`, its largest
// magnitude, is unusable.
template <typename Format>
TORCHBAGUA_ELEMENT Range make_range(float min, float max, int magnitude) {
  const bool usable = magnitude < Format::kUnusable;
  const unsigned int nan = bits_of(not_a_number());
  const Range range = Format::widened(Range{min + 0.0f, max + 0.0f});  // removes -0: the sign of a zero is undefined
  return Range{float_of(select(usable, bits_of(range.min), nan)), float_of(select(usable, bits_of(range.max), nan))};
}

TORCHBAGUA_ELEMENT bool is_usable(Range range) {
  return (magnitude_of(range.min) < kUnusableMagnitude) & (magnitude_of(range.max) < kUnusableMagnitude) &
         (range.min <= range.max);
}

// Accepts any range; for a range that no encoder writes, the coder decodes everything to NaN.
template <typename Format>
TORCHBAGUA_ELEMENT Coder make_coder(Range range) {
  const bool usable = is_usable(range);
  const unsigned int negative = select(range.max < 0.0f, bits_of(range.max), 0u);
  const float pivot = float_of(select(range.min > 0.0f, bits_of(range.min), negative));
  const float width = range.max - range.min;
  const bool narrow = width < kNarrowestRange;
  const float inverse = float_of(select(narrow, 0u, bits_of(Format::kSteps / width)));
  const float step = float_of(select(narrow, 0u, bits_of(width / Format::kSteps)));
  const float lowest = round_half_even((range.max - pivot) * inverse) - Format::kSteps;
  const unsigned int nan = bits_of(not_a_number());
  return Coder{range.min,
               range.max + 0.0f,  // no -0, see dequantize_steps
               float_of(select(usable, bits_of(pivot), nan)),
               inverse,
               step,
               float_of(select(usable, bits_of(lowest), nan))};
}

TORCHBAGUA_ELEMENT bool is_usable(const Coder& coder) { return coder.lowest == coder.lowest; }

// `value` must be an element of the block that the coder's range describes, and the range must be usable. Then no code
// is too large: the range's maximum undergoes the same operations as `value`, and they preserve the order of two
// numbers.
template <typename Format>
TORCHBAGUA_ELEMENT unsigned int quantize(float value, const Coder& coder) {
  // Compares and subtracts shifted values, for which both are exact: the difference of the bits is the code.
  const float lowest = coder.lowest + kRoundingShift;
  const float shifted = (value - coder.pivot) * coder.inverse + kRoundingShift;
  return bits_of(max_number(shifted, lowest)) - bits_of(lowest);
}

// A value from its code plus coder.lowest, which is an exact integer however it is computed. On a GPU, the range must
// be usable: then the value is a number, and it is not -0 because the pivot is not.
TORCHBAGUA_ELEMENT float dequantize_steps(float steps, const Coder& coder) {
  return min_number(max_number(coder.pivot + steps * coder.step, coder.min), coder.max);
}

TORCHBAGUA_ELEMENT float dequantize(int code, const Coder& coder) {
  return dequantize_steps(static_cast<float>(code) + coder.lowest, coder);
}

}  // namespace torchbagua
