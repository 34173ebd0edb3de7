// The format of MinMaxUInt4: half a byte per element, and a header of two bfloat16 values.
#pragma once

#include "minmax.h"

namespace torchbagua {

struct MinMaxUInt4Format {
  static constexpr const char* kName = "minmax_uint4";
  static constexpr int kCodeBits = 4;
  static constexpr float kSteps = 15.0f;

  // Just above 2^126 - 2^118, the largest bfloat16 below 2^126.
  static constexpr int kUnusable = 0x7e7f0001;

  struct Header {
    unsigned int words[1];
  };

  // A bfloat16 is the upper half of a float. Truncating the lower half rounds toward zero; adding the largest value of
  // the lower half first rounds away from zero instead.
  static TORCHBAGUA_ELEMENT Range widened(Range range) {
    const unsigned int min = bits_of(range.min);
    const unsigned int max = bits_of(range.max);
    const unsigned int min_is_negative = 0u - (min >> 31);
    const unsigned int max_is_negative = 0u - (max >> 31);
    // A maximum between -2^-133 and 0 becomes -0, then +0.
    return Range{float_of((min + (min_is_negative & 0xffffu)) & 0xffff0000u),
                 float_of((max + (~max_is_negative & 0xffffu)) & 0xffff0000u) + 0.0f};
  }

  static TORCHBAGUA_ELEMENT Header pack(Range range) {
    return Header{{bits_of(range.min) >> 16 | (bits_of(range.max) & 0xffff0000u)}};
  }

  static TORCHBAGUA_ELEMENT Range unpack(Header header) {
    return Range{float_of(header.words[0] << 16), float_of(header.words[0] & 0xffff0000u)};
  }
};

}  // namespace torchbagua
