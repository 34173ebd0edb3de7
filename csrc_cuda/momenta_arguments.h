// Checks lists of momenta and converts them to the form that kernels take.
#pragma once

#include <utility>
#include <vector>

#include "arguments.h"
#include "element/qadam.h"

namespace torchbagua::binding {

// The momentum of one parameter, or of a part of one: of the elements [begin, end) of the gradients.
struct Momentum {
  long long begin;
  long long end;
  const void* values;
  ScalarType type;
  QAdamForm form;
};

using Tensors = std::vector<Tensor>;
using Numbers = std::vector<double>;

// All momenta of a call; none of them is empty.
struct Momenta {
  std::vector<Momentum> all;
  mutable size_t last = 0;  // the result of the last lookup, since lookups are in order

  // The momentum with this element. The momenta after it in memory have the elements after it.
  TORCHBAGUA_ELEMENT const Momentum* from(long long element) const {
    const Momentum* const momenta = all.data();
    size_t i = element < momenta[last].begin ? 0 : last;
    while (momenta[i].end <= element) {
      ++i;
    }
    last = i;
    return momenta + i;
  }
};

// The momenta of `num_elements` gradients, in order, with the numbers of each.
inline Momenta momenta_of(const Call& call, const Tensors& tensors, const Numbers& beta1s, const Numbers& shares,
                          int64_t num_elements) {
  int64_t together = 0;
  for (const Tensor& momentum : tensors) {
    check(call, {"momenta", momentum}, has_elements(momentum), kElementTypes, {{"M"}});
    together += momentum.numel();
  }
  if (together != num_elements) {
    refuse(call, "momenta", text_of("of the same total length as gradients, ", num_elements), text_of(together));
  }
  const std::pair<const char*, const Numbers&> lists[] = {{"beta1s", beta1s}, {"shares", shares}};
  for (const auto& [name, numbers] : lists) {
    if (numbers.size() != tensors.size()) {
      refuse(call, name, text_of("a list of ", tensors.size(), " numbers"), text_of("a list of ", numbers.size()));
    }
  }
  Momenta momenta;
  long long begin = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const QAdamForm form{static_cast<float>(beta1s[i]), static_cast<float>(shares[i])};
    const long long end = begin + tensors[i].numel();
    if (begin < end) {
      momenta.all.push_back({begin, end, tensors[i].const_data_ptr(), tensors[i].scalar_type(), form});
    }
    begin = end;
  }
  return momenta;
}

}  // namespace torchbagua::binding
