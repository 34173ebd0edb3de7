// One element of the ring of compressed differences; docs/arithmetic.md has the formulas. Freestanding, like casts.h.
#pragma once

#include "casts.h"

namespace torchbagua {

// Takes one third of the weights of each neighbor.
TORCHBAGUA_ELEMENT float ring_difference(float weight, float own, float third_of_left, float third_of_right) {
  return third_of_left + weight + third_of_right - own * (5.0f / 3.0f);
}

}  // namespace torchbagua
