// Several elements that one instruction loads or stores together.
#pragma once

namespace torchbagua::cuda {

constexpr int kVectorBytes = 16;  // the maximum

template <typename Element, int kWidth>
struct alignas(sizeof(Element) * kWidth) Vector {
  Element elements[kWidth];
};

template <int kWidth, typename Element>
__device__ __forceinline__ bool is_aligned(const Element* pointer) {
  return reinterpret_cast<unsigned long long>(pointer) % (kWidth * sizeof(Element)) == 0;
}

}  // namespace torchbagua::cuda
