// The format of MinMaxUInt8: a byte for each element, and a header of two float32.
#pragma once

#include "minmax.h"

namespace torchbagua {

struct MinMaxUInt8Format {
  static constexpr const char* kName = "minmax_uint8";
  static constexpr int kCodeBits = 8;
  static constexpr float kSteps = 255.0f;

  // The bits of the smallest magnitude that a block cannot hold.
  static constexpr int kUnusable = kUnusableMagnitude;

  // Bytes that go to the wire as they lie in memory, the lowest of each word first.
  struct Header {
    unsigned int words[2];
  };

  // The smallest range around another that a header can hold.
  static TORCHBAGUA_ELEMENT Range widened(Range range) { return range; }

  static TORCHBAGUA_ELEMENT Header pack(Range range) { return Header{{bits_of(range.min), bits_of(range.max)}}; }

  static TORCHBAGUA_ELEMENT Range unpack(Header header) {
    return Range{float_of(header.words[0]), float_of(header.words[1])};
  }
};

}  // namespace torchbagua
