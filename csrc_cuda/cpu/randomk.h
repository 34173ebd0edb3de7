// RandomK: which elements of a block are drawn.
#pragma once

#include "element/randomk.h"
#include "sparse.h"

namespace torchbagua::cpu {

struct DrawnElements {
  using Format = RandomKFormat;

  static constexpr const char* kName = "randomk";
  static constexpr const char* kFurtherFields = ", key";

  static TORCHBAGUA_ELEMENT void draw(const DrawnBlock& block, Kept& found) {
    for (int draw = 0; draw < num_draws(block); ++draw) {
      draw_elements(block, draw, [&](int i, int index) TORCHBAGUA_INLINED { found.indices[i] = index; });
    }
  }

  template <typename T>
  static TORCHBAGUA_ELEMENT float select(const T* x, const DrawnBlock& block, Kept& found) {
    const int largest = largest_magnitude(x, block.length);
    if (largest >= kUnusableMagnitude) {  // of an element that may not be drawn
      return float_of(static_cast<unsigned int>(largest));
    }
    draw(block, found);
    int largest_kept = 0;
    for (long long i = 0; i < block.kept; ++i) {
      largest_kept = std::max(largest_kept, magnitude_of(to_float(x[found.indices[i]])));
    }
    return float_of(static_cast<unsigned int>(largest_kept));
  }

  static TORCHBAGUA_ELEMENT void write_indices(const Kept&, const DrawnBlock&, uint8_t*) {}

  static TORCHBAGUA_ELEMENT bool read_indices(const uint8_t*, const DrawnBlock& block, Kept& found) {
    draw(block, found);
    return true;
  }
};

TORCHBAGUA_CPU_CODEC(SparseCodec<DrawnElements>)

}  // namespace torchbagua::cpu
