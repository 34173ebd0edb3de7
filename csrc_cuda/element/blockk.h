// Which elements of a block BlockK sends, and their encoding; see docs/arithmetic.md. Freestanding, like casts.h.
#pragma once

#include "sparse.h"

namespace torchbagua {

struct BlockKFormat {
  static TORCHBAGUA_ELEMENT long long index_bytes(const SparseBlock&) { return 2; }
};

// A block is divided into consecutive runs of `kept` elements. The last run ends with the block, and may begin inside
// the run before it.
TORCHBAGUA_ELEMENT int num_runs(const SparseBlock& block) {
  return static_cast<int>((block.length + block.kept - 1) / block.kept);
}

TORCHBAGUA_ELEMENT int run_start(const SparseBlock& block, int run) {
  const int last = static_cast<int>(block.length - block.kept);
  const int start = run * static_cast<int>(block.kept);
  return start < last ? start : last;
}

// The sum of the squares, which are exact, of a run of `values`, in the order of the elements.
template <typename T>
TORCHBAGUA_ELEMENT double sum_of_squares(const T* values, long long count) {
  double sum = 0.0;
  for (long long i = 0; i < count; ++i) {
    const double value = to_float(values[i]);
    sum += value * value;
  }
  return sum;
}

TORCHBAGUA_ELEMENT int read_run(const unsigned char* payload) { return payload[0] | payload[1] << 8; }

}  // namespace torchbagua
