// TopK: selects the elements of a block with the largest magnitudes.
#include "element/topk.h"

#include "sparse.h"

namespace torchbagua::cpu {

struct LargestElements {
  using Format = TopKFormat;

  static constexpr const char* kName = "topk";

  static TORCHBAGUA_ELEMENT int num_not_below(const int* magnitudes, long long length, int least) {
    int count = 0;
#pragma omp simd reduction(+ : count)
    for (long long i = 0; i < length; ++i) {
      count += magnitudes[i] >= least;
    }
    return count;
  }

  // The threshold for the magnitudes to send is determined bit by bit, from the highest: a bit is set if enough
  // magnitudes are no smaller than the result. Counting all of them again is faster than sorting.
  template <typename T>
  static TORCHBAGUA_ELEMENT float select(const T* x, const SparseBlock& block, Kept& found) {
    const long long length = block.length;
    int* const magnitudes = found.magnitudes;
    int largest = 0;
#pragma omp simd reduction(max : largest)
    for (long long i = 0; i < length; ++i) {
      magnitudes[i] = magnitude_of(to_float(x[i]));
      largest = largest < magnitudes[i] ? magnitudes[i] : largest;
    }
    if (largest >= kUnusableMagnitude) {
      return float_of(static_cast<unsigned int>(largest));
    }
    int smallest = 0;
    for (int bit = 30; bit >= 0; --bit) {
      const int candidate = smallest | 1 << bit;
      const int count = candidate <= largest ? num_not_below(magnitudes, length, candidate) : 0;
      if (count >= block.kept) {
        smallest = candidate;
      }
      if (count == block.kept) {
        break;
      }
    }
    // Of the magnitudes equal to the threshold, sends the first ones, as many as the larger ones leave room for.
    long long room = block.kept - num_not_below(magnitudes, length, smallest + 1);
    long long written = 0;
    const auto add = [&](long long i) TORCHBAGUA_INLINED {
      const bool is_larger = magnitudes[i] > smallest;
      if (is_larger || room > 0) {
        found.indices[written++] = static_cast<int>(i);
        room -= !is_larger;
      }
    };
    long long first = 0;
    for (; first + kLanes <= length; first += kLanes) {
      unsigned int any = 0;
#pragma omp simd reduction(| : any)
      for (long long lane = 0; lane < kLanes; ++lane) {
        any |= static_cast<unsigned int>(magnitudes[first + lane] >= smallest) << lane;
      }
      for (; any != 0; any &= any - 1) {
        add(first + lowest_bit(any));
      }
    }
    for (; first < length; ++first) {
      if (magnitudes[first] >= smallest) {
        add(first);
      }
    }
    return float_of(static_cast<unsigned int>(largest));
  }

  static TORCHBAGUA_ELEMENT int lowest_bit(unsigned int bits) {
#if defined(__GNUC__)
    return __builtin_ctz(bits);
#else
    int bit = 0;
    while ((bits >> bit & 1) == 0) {
      ++bit;
    }
    return bit;
#endif
  }

  static TORCHBAGUA_ELEMENT void write_indices(const Kept& found, const SparseBlock& block, uint8_t* payload) {
    const int bits = index_bits(block.length);
    uint64_t stream = 0;
    int num_bits = 0;
    for (long long i = 0; i < block.kept; ++i) {
      stream |= static_cast<uint64_t>(found.indices[i]) << num_bits;
      for (num_bits += bits; num_bits >= 8; num_bits -= 8, stream >>= 8) {
        *payload++ = static_cast<uint8_t>(stream);
      }
    }
    if (num_bits > 0) {
      *payload = static_cast<uint8_t>(stream);
    }
  }

  static TORCHBAGUA_ELEMENT bool read_indices(const uint8_t* payload, const SparseBlock& block, Kept& found) {
    const int bits = index_bits(block.length);
    bool are_ascending = true;
    int before = -1;
    for (long long i = 0; i < block.kept; ++i) {
      found.indices[i] = read_index(payload, i, bits);
      are_ascending = are_ascending && found.indices[i] > before;
      before = found.indices[i];
    }
    return are_ascending && before < block.length;
  }
};

TORCHBAGUA_CPU_CODEC(SparseCodec<LargestElements>)

}  // namespace torchbagua::cpu
