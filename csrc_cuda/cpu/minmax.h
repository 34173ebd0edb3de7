// The loops of the min-max codecs over blocks, templates over a format of element/.
#pragma once

#include <limits>
#include <type_traits>

#include "codec.h"
#include "element/minmax.h"
#include "float16.h"

namespace torchbagua::cpu {

// The extremes of a set of floats, from their bits: extremes of integers can be computed in any order, which needs the
// fewest instructions. Positive floats are in the order of their bits and negative floats in reverse order, and NaN is
// beyond Inf on both sides. Initially empty.
struct Extremes {
  int smallest = std::numeric_limits<int>::max();  // computed only if all have the same sign
  int largest = std::numeric_limits<int>::min();
  unsigned int largest_unsigned = 0;

  TORCHBAGUA_ELEMENT bool has_one_sign() const { return largest < 0 || largest_unsigned >> 31 == 0; }
  TORCHBAGUA_ELEMENT float min() const {
    return float_of(largest_unsigned >> 31 ? largest_unsigned : static_cast<unsigned int>(smallest));
  }
  TORCHBAGUA_ELEMENT float max() const { return float_of(static_cast<unsigned int>(largest < 0 ? smallest : largest)); }
};

TORCHBAGUA_ELEMENT void join(Extremes& extremes, const Extremes& other) {
  extremes.smallest = std::min(extremes.smallest, other.smallest);
  extremes.largest = std::max(extremes.largest, other.largest);
  extremes.largest_unsigned = std::max(extremes.largest_unsigned, other.largest_unsigned);
}

// The bits of an element, in its width: one instruction compares twice as many 16-bit as 32-bit elements.
TORCHBAGUA_ELEMENT int signed_bits_of(float value) { return static_cast<int>(bits_of(value)); }
TORCHBAGUA_ELEMENT short signed_bits_of(BFloat16 value) { return static_cast<short>(value.bits); }
TORCHBAGUA_ELEMENT short signed_bits_of(Float16 value) { return static_cast<short>(value.bits); }

// The bits of a float from the bits of a T. Preserves the sign and the order.
template <typename T>
TORCHBAGUA_ELEMENT unsigned int widened(std::make_unsigned_t<decltype(signed_bits_of(T{}))> bits) {
  if constexpr (std::is_same_v<T, float>) {
    return bits;
  } else {
    return bits_of(to_float(T{bits}));
  }
}

template <typename T>
TORCHBAGUA_ELEMENT Extremes extremes_of(const T* values, long long all) {
  using Signed = decltype(signed_bits_of(T{}));
  using Unsigned = std::make_unsigned_t<Signed>;
  Extremes extremes;
  with_length(all, [&](long long length) TORCHBAGUA_INLINED {
    Signed largest = std::numeric_limits<Signed>::min();
    Unsigned largest_unsigned = 0;
#pragma omp simd reduction(max : largest, largest_unsigned)
    for (long long i = 0; i < length; ++i) {
      const Signed bits = signed_bits_of(values[i]);
      const Unsigned as_unsigned = static_cast<Unsigned>(bits);
      largest = bits > largest ? bits : largest;
      largest_unsigned = as_unsigned > largest_unsigned ? as_unsigned : largest_unsigned;
    }
    extremes.largest = static_cast<int>(widened<T>(static_cast<Unsigned>(largest)));
    extremes.largest_unsigned = widened<T>(largest_unsigned);
  });
  if (extremes.has_one_sign()) {
    Signed smallest = std::numeric_limits<Signed>::max();
#pragma omp simd reduction(min : smallest)
    for (long long i = 0; i < all; ++i) {
      const Signed bits = signed_bits_of(values[i]);
      smallest = bits < smallest ? bits : smallest;
    }
    extremes.smallest = static_cast<int>(widened<T>(static_cast<Unsigned>(smallest)));
  }
  return extremes;
}

template <typename T, typename Format>
TORCHBAGUA_ELEMENT void quantize_each(const T* values, long long length, const Coder& coder, uint8_t* codes) {
#pragma omp simd
  for (long long i = 0; i < length; ++i) {
    codes[i] = static_cast<uint8_t>(quantize<Format>(to_float(values[i]), coder));
  }
}

// The payload of values. With 4-bit codes, the first of two elements is in the lower half of their byte, and the upper
// half of the last byte is 0 if the number of elements is odd.
template <typename Format, typename T>
TORCHBAGUA_ELEMENT void quantize_all(const T* values, long long all, const Coder& coder, uint8_t* payload) {
  if constexpr (Format::kCodeBits == 8) {
    with_length(all,
                [&](long long length) TORCHBAGUA_INLINED { quantize_each<T, Format>(values, length, coder, payload); });
    return;
  }
  alignas(64) uint8_t codes[kPart];
  for (long long first = 0; first < all; first += kPart) {
    with_length(std::min(kPart, all - first), [&](long long length) TORCHBAGUA_INLINED {
      quantize_each<T, Format>(values + first, length, coder, codes);
      if (length % 2 != 0) {
        codes[length] = 0;
      }
      uint8_t* pairs = payload + first / 2;
#pragma omp simd
      for (long long i = 0; i < (length + 1) / 2; ++i) {
        pairs[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
      }
    });
  }
}

// The bit offset of the first byte of a 16-bit word in memory.
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
constexpr int kFirstByte = 8;
#else
constexpr int kFirstByte = 0;
#endif

// Calls `use(first, length, codes)` with the codes of a payload, one byte each: all together, or up to kPart at a time.
template <typename Format, typename Use>
TORCHBAGUA_ELEMENT void with_codes(const uint8_t* payload, long long all, const Use& use) {
  if constexpr (Format::kCodeBits == 8) {
    with_length(all, [&](long long length) TORCHBAGUA_INLINED { use(0, length, payload); });
    return;
  }
  alignas(64) uint16_t codes[kPart / 2];  // pairs of one-byte codes, unpacked by one instruction
  for (long long first = 0; first < all; first += kPart) {
    with_length(std::min(kPart, all - first), [&](long long length) TORCHBAGUA_INLINED {
      const uint8_t* pairs = payload + first / 2;
#pragma omp simd
      for (long long i = 0; i < (length + 1) / 2; ++i) {
        codes[i] = static_cast<uint16_t>((pairs[i] << kFirstByte | pairs[i] << 4 >> kFirstByte) & 0x0f0f);
      }
      use(first, length, reinterpret_cast<const uint8_t*>(codes));
    });
  }
}

// The coders of a batch of blocks, computed by vector instructions.
template <typename Format>
struct Coders {
  float min[kBatch] = {};
  float max[kBatch] = {};
  float pivot[kBatch];
  float inverse[kBatch];
  float step[kBatch];
  float lowest[kBatch];

  TORCHBAGUA_ELEMENT void form() {
#pragma omp simd
    for (long long i = 0; i < kBatch; ++i) {
      const Coder coder = make_coder<Format>(Range{min[i], max[i]});
      min[i] = coder.min;
      max[i] = coder.max;
      pivot[i] = coder.pivot;
      inverse[i] = coder.inverse;
      step[i] = coder.step;
      lowest[i] = coder.lowest;
    }
  }

  TORCHBAGUA_ELEMENT void read(const uint8_t* wire, const Block* blocks, long long num_blocks) {
    for (long long i = 0; i < num_blocks; ++i) {
      const Range range = Format::unpack(read_header<typename Format::Header>(wire + blocks[i].header));
      min[i] = range.min;
      max[i] = range.max;
    }
    form();
  }

  // Computes the coders of blocks with these extremes, and writes the headers.
  TORCHBAGUA_ELEMENT void write(const Extremes* extremes, uint8_t* wire, const Block* blocks, long long num_blocks) {
    for (long long i = 0; i < num_blocks; ++i) {
      min[i] = extremes[i].min();
      max[i] = extremes[i].max();
    }
#pragma omp simd
    for (long long i = 0; i < kBatch; ++i) {
      const int of_min = magnitude_of(min[i]);
      const int of_max = magnitude_of(max[i]);
      const Range range = make_range<Format>(min[i], max[i], of_min > of_max ? of_min : of_max);
      min[i] = range.min;
      max[i] = range.max;
    }
    for (long long i = 0; i < num_blocks; ++i) {
      write_header(wire + blocks[i].header, Format::pack(Range{min[i], max[i]}));
    }
    form();
  }

  TORCHBAGUA_ELEMENT Coder of(long long i) const {
    return Coder{min[i], max[i], pivot[i], inverse[i], step[i], lowest[i]};
  }
};

template <typename Format>
struct MinMax : DenseCodec<MinMax<Format>> {
  using Header = typename Format::Header;
  using Decoders = Coders<Format>;
  static constexpr const char* kName = Format::kName;
  static constexpr long long kHeaderBytes = sizeof(Header);

  static TORCHBAGUA_ELEMENT long long payload_bytes(long long length) {
    return Format::kCodeBits == 8 ? length : length / 2 + length % 2;
  }

  template <typename T, typename Meanwhile>
  static TORCHBAGUA_ELEMENT void encode_meanwhile(const T* x, const Table& table, uint8_t* wire,
                                                  const Meanwhile& meanwhile) {
    Extremes extremes[kBatch];
    Coders<Format> coders;
    for (long long b = 0; b < table.num_blocks;) {
      const long long num_blocks = size_of_batch(table, b);
      for (long long i = 0; i < num_blocks; ++i) {
        extremes[i] = extremes_of(x + table.blocks[b + i].start, table.blocks[b + i].length);
      }
      coders.write(extremes, wire, table.blocks + b, num_blocks);
      for (long long i = 0; i < num_blocks; ++i) {
        const Block block = table.blocks[b + i];
        const T* values = x + block.start;
        const Coder coder = coders.of(i);
        for (long long first = 0; first < block.length; first += kPart) {
          meanwhile(b + num_blocks + i, first);
          const long long length = std::min(kPart, block.length - first);
          with_fast_elements(values + first, length, [&](const auto* part) TORCHBAGUA_INLINED {
            put_codes(part, length, coder, wire + block.payload + payload_bytes(first));
          });
        }
      }
      b += num_blocks;
    }
  }

  template <typename T>
  static TORCHBAGUA_ELEMENT void put_codes(const T* values, long long length, const Coder& coder, uint8_t* payload) {
    if (is_usable(coder)) {
      quantize_all<Format>(values, length, coder, payload);
    } else {
      std::memset(payload, 0, payload_bytes(length));
    }
  }

  template <typename T>
  static TORCHBAGUA_ELEMENT void decode_payload(const Coder& coder, const uint8_t* payload, long long length,
                                                T* values) {
    if (is_usable(coder)) {
      fill_numbers(values, length, [=](auto* part) TORCHBAGUA_INLINED {
        decode_each(coder, payload, length,
                    [=](long long k, float value) TORCHBAGUA_INLINED { from_number(value, part[k]); });
      });
    } else {
      T nan;
      from_float(not_a_number(), nan);
      std::fill(values, values + length, nan);
    }
  }

  template <typename Put>
  static TORCHBAGUA_ELEMENT void decode_each(const Coder& coder, const uint8_t* payload, long long length,
                                             const Put& put) {
    with_codes<Format>(payload, length, [&](long long first, long long num, const uint8_t* codes) TORCHBAGUA_INLINED {
#pragma omp simd
      for (long long k = 0; k < num; ++k) {
        put(first + k, dequantize(codes[k], coder));
      }
    });
  }

  static TORCHBAGUA_ELEMENT void decode_mean_encode(const Rows& rows, const Table& table, float divisor,
                                                    uint8_t* wire) {
    alignas(64) float mean[kTile];
    long long offsets[kBatch];
    Extremes extremes[kBatch];
    Coders<Format> coders;
    for (long long b = 0; b < table.num_blocks;) {
      const long long num_blocks = size_of_batch(table, b);
      const Block* blocks = table.blocks + b;
      const auto place = [&](long long i) TORCHBAGUA_INLINED { return mean + offsets[i]; };
      long long offset = 0;
      for (long long i = 0; i < num_blocks; ++i) {
        extremes[i] = Extremes{};
        offsets[i] = offset;
        offset += blocks[i].length;
      }
      for (long long first = 0; first < blocks[0].length; first += kTile) {
        MinMax::mean_of(rows, table, divisor, b, num_blocks, first, place);
        for (long long i = 0; i < num_blocks; ++i) {
          join(extremes[i], extremes_of(place(i), std::min(kTile, blocks[i].length - first)));
        }
      }
      coders.write(extremes, wire, blocks, num_blocks);
      for (long long first = 0; first < blocks[0].length; first += kTile) {
        if (blocks[0].length > kTile) {  // a block longer than the tile: compute its mean again
          MinMax::mean_of(rows, table, divisor, b, num_blocks, first, place);
        }
        for (long long i = 0; i < num_blocks; ++i) {
          put_codes(place(i), std::min(kTile, blocks[i].length - first), coders.of(i),
                    wire + blocks[i].payload + payload_bytes(first));
        }
      }
      b += num_blocks;
    }
  }
};

}  // namespace torchbagua::cpu
