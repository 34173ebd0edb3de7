// The format of MinMaxUInt8: one byte per element, and a header of two float32 values.
#pragma once

#include "minmax.h"

namespace torchbagua {

struct MinMaxUInt8Format {
  static constexpr const char* kName = "minmax_uint8";
  static constexpr int kCodeBits = 8;
  static constexpr float kSteps = 255.0f;

  // The bits of the smallest magnitude that a block cannot encode.
  static constexpr int kUnusable = kUnusableMagnitude;

  // These bytes are copied to the wire in memory order, the lowest byte of each word first.
  struct Header {
    unsigned int words[2];
  };

  // The smallest range that a header can store around another range.
  static TORCHBAGUA_ELEMENT Range widened(Range range) { return range; }

  static TORCHBAGUA_ELEMENT Header pack(Range range) { return Header{{bits_of(range.min), bits_of(range.max)}}; }

  static TORCHBAGUA_ELEMENT Range unpack(Header header) {
    return Range{float_of(header.words[0]), float_of(header.words[1])};
  }
};

}  // namespace torchbagua
