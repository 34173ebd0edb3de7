// BlockK: selects the run of elements of a block with the largest sum of squares.
#include "element/blockk.h"

#include "sparse.h"

namespace torchbagua::cpu {

struct LargestRun {
  using Format = BlockKFormat;

  static constexpr const char* kName = "blockk";

  template <typename T>
  static TORCHBAGUA_ELEMENT float select(const T* x, const SparseBlock& block, Kept& found) {
    const int largest = largest_magnitude(x, block.length);
    if (largest >= kUnusableMagnitude) {
      return float_of(static_cast<unsigned int>(largest));
    }
    int chosen = 0;
    double most = -1.0;
    for (int run = 0; run < num_runs(block); ++run) {
      const double sum = sum_of_squares(x + run_start(block, run), block.kept);
      if (sum > most) {
        most = sum;
        chosen = run;
      }
    }
    set_indices(block, chosen, found);
    return float_of(static_cast<unsigned int>(largest_magnitude(x + found.indices[0], block.kept)));
  }

  static TORCHBAGUA_ELEMENT void set_indices(const SparseBlock& block, int run, Kept& found) {
    const int start = run_start(block, run);
    for (int i = 0; i < block.kept; ++i) {
      found.indices[i] = start + i;
    }
  }

  // Rounded up, since the start of the last run need not be a multiple of its length.
  static TORCHBAGUA_ELEMENT void write_indices(const Kept& found, const SparseBlock& block, uint8_t* payload) {
    const long long run = (found.indices[0] + block.kept - 1) / block.kept;
    payload[0] = static_cast<uint8_t>(run);
    payload[1] = static_cast<uint8_t>(run >> 8);
  }

  static TORCHBAGUA_ELEMENT bool read_indices(const uint8_t* payload, const SparseBlock& block, Kept& found) {
    const int run = read_run(payload);
    set_indices(block, run, found);
    return run < num_runs(block);
  }
};

TORCHBAGUA_CPU_CODEC(SparseCodec<LargestRun>)

}  // namespace torchbagua::cpu
