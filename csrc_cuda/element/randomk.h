// Which elements of a block RandomK keeps; docs/arithmetic.md. Freestanding, as casts.h.
#pragma once

#include "sparse.h"

namespace torchbagua {

// A row of RandomK's table.
struct DrawnBlock : SparseBlock {
  long long key;  // of the random numbers
};

struct RandomKFormat {
  using Row = DrawnBlock;

  static TORCHBAGUA_ELEMENT long long index_bytes(const Row&) { return 0; }
};

// Numbers that one call of the generator gives.
constexpr int kWordsOfADraw = 4;

// Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011) of the counter (counter, 0, 0, 0).
TORCHBAGUA_ELEMENT void philox(long long key, unsigned int counter, unsigned int (&words)[kWordsOfADraw]) {
  unsigned int low = static_cast<unsigned int>(key);
  unsigned int high = static_cast<unsigned int>(static_cast<unsigned long long>(key) >> 32);
  words[0] = counter;
  words[1] = words[2] = words[3] = 0;
  for (int round = 0; round < 10; ++round) {
    const unsigned long long first = 0xd2511f53ull * words[0];
    const unsigned long long second = 0xcd9e8d57ull * words[2];
    words[0] = static_cast<unsigned int>(second >> 32) ^ words[1] ^ low;
    words[1] = static_cast<unsigned int>(second);
    words[2] = static_cast<unsigned int>(first >> 32) ^ words[3] ^ high;
    words[3] = static_cast<unsigned int>(first);
    low += 0x9e3779b9u;
    high += 0xbb67ae85u;
  }
}

// Where the stratum `i` of a block begins: as many as are kept, of nearly equal length.
TORCHBAGUA_ELEMENT int stratum_start(const DrawnBlock& block, int i) {
  return i * static_cast<int>(block.length) / static_cast<int>(block.kept);
}

// Calls `put(i, index)` for the elements that are kept from the strata of one draw: up to four, from 4 * `draw` on.
template <typename Put>
TORCHBAGUA_ELEMENT void draw_elements(const DrawnBlock& block, int draw, const Put& put) {
  unsigned int words[kWordsOfADraw];
  philox(block.key, static_cast<unsigned int>(draw), words);
#if defined(__CUDA_ARCH__)
#pragma unroll  // words stay in registers
#endif
  for (int word = 0; word < kWordsOfADraw; ++word) {
    const int i = draw * kWordsOfADraw + word;
    if (i < block.kept) {
      const int start = stratum_start(block, i);
      const unsigned int width = static_cast<unsigned int>(stratum_start(block, i + 1) - start);
      put(i, start + static_cast<int>(static_cast<unsigned long long>(words[word]) * width >> 32));
    }
  }
}

TORCHBAGUA_ELEMENT int num_draws(const DrawnBlock& block) {
  return static_cast<int>((block.kept + kWordsOfADraw - 1) / kWordsOfADraw);
}

}  // namespace torchbagua
