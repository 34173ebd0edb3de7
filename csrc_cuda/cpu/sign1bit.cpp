// The loops of Sign1Bit over blocks: one pass packs the signs and sums the magnitudes. Signs are processed 32 at a
// time, as a word: bit i is the sign of element i, and its lowest byte comes first in the wire.
#include "element/sign1bit.h"

#include "codec.h"
#include "float16.h"

namespace torchbagua::cpu {

static_assert(kLanes == kSignLanes && kTile % kLanes == 0, "a lane's sum continues from tile to tile");

// Only bit `lane` is set. A table, since not every instruction set can shift each element by a different number.
struct LaneBits {
  uint32_t bits[kLanes];
};

constexpr LaneBits make_lane_bits() {
  LaneBits result{};
  for (long long lane = 0; lane < kLanes; ++lane) {
    result.bits[lane] = 1u << lane;
  }
  return result;
}

constexpr LaneBits kLaneBit = make_lane_bits();

// The first `num_bytes` bytes, at most 4, of the signs of up to 32 elements.
TORCHBAGUA_ELEMENT uint32_t read_signs(const uint8_t* from, long long num_bytes) {
  uint32_t signs = 0;
  for (long long i = 0; i < num_bytes; ++i) {
    signs |= static_cast<uint32_t>(from[i]) << (8 * i);
  }
  return signs;
}

TORCHBAGUA_ELEMENT void write_signs(uint32_t signs, long long num_bytes, uint8_t* to) {
  for (long long i = 0; i < num_bytes; ++i) {
    to[i] = static_cast<uint8_t>(signs >> (8 * i));
  }
}

// Running sums of the magnitudes of a block that may be processed in parts; initially zero.
struct MagnitudeSums {
  float lanes[kLanes] = {};
};

TORCHBAGUA_ELEMENT float total_of(MagnitudeSums& sums) {
  float* const lanes = sums.lanes;
  fold_lanes([=](long long lane, long long other) TORCHBAGUA_INLINED { lanes[lane] += lanes[other]; });
  return lanes[0];
}

// The scales of a batch of blocks.
struct Scales {
  float scales[kBatch];

  TORCHBAGUA_ELEMENT void read(const uint8_t* wire, const Block* blocks, long long num_blocks) {
    for (long long i = 0; i < num_blocks; ++i) {
      scales[i] = read_header<float>(wire + blocks[i].header);
    }
  }

  TORCHBAGUA_ELEMENT float of(long long i) const { return scales[i]; }
};

struct Sign1Bit : DenseCodec<Sign1Bit> {
  static constexpr const char* kName = "sign1bit";
  using Decoders = Scales;
  static constexpr long long kHeaderBytes = sizeof(float);

  static TORCHBAGUA_ELEMENT long long payload_bytes(long long length) { return length / 8 + (length % 8 != 0); }

  // Adds the magnitudes of the values to the sums and writes their signs. The lengths of all parts of a block except
  // the last must be multiples of kLanes.
  template <typename T>
  static TORCHBAGUA_ELEMENT void scan(const T* values, long long length, MagnitudeSums& sums, uint8_t* payload) {
    MagnitudeSums running = sums;  // a copy, in registers
    long long first = 0;
    for (; first + kLanes <= length; first += kLanes) {
      uint32_t signs = 0;
#pragma omp simd reduction(| : signs)
      for (long long lane = 0; lane < kLanes; ++lane) {
        const float value = to_float(values[first + lane]);
        running.lanes[lane] += absolute(value);
        signs |= sign_mask(value) & kLaneBit.bits[lane];
      }
      write_signs(signs, 4, payload + first / 8);
    }
    if (first < length) {
      uint32_t signs = 0;
      for (long long lane = 0; lane < length - first; ++lane) {
        const float value = to_float(values[first + lane]);
        running.lanes[lane] += absolute(value);
        signs |= sign_mask(value) & kLaneBit.bits[lane];
      }
      write_signs(signs, payload_bytes(length - first), payload + first / 8);
    }
    sums = running;
  }

  // Writes the header of a block after its payload, and zeroes the payload if the scale is not usable.
  static TORCHBAGUA_ELEMENT void finish(const Block& block, MagnitudeSums& sums, uint8_t* wire) {
    const float scale = make_scale(total_of(sums), static_cast<float>(block.length));
    write_header(wire + block.header, scale);
    if (!is_usable(scale)) {
      std::memset(wire + block.payload, 0, payload_bytes(block.length));
    }
  }

  template <typename T, typename Meanwhile>
  static TORCHBAGUA_ELEMENT void encode_meanwhile(const T* x, const Table& table, uint8_t* wire,
                                                  const Meanwhile& meanwhile) {
    constexpr long long kScanned = kPart * sizeof(float) / sizeof(T);  // an equal number of bytes for every type
    for (long long b = 0; b < table.num_blocks; ++b) {
      const Block block = table.blocks[b];
      MagnitudeSums sums;
      for (long long first = 0; first < block.length; first += kScanned) {
        for (long long k = first; k < first + kScanned; k += kPart) {
          meanwhile(b + 1, k);
        }
        const long long length = std::min(kScanned, block.length - first);
        with_fast_elements(x + block.start + first, length, [&](const auto* part) TORCHBAGUA_INLINED {
          scan(part, length, sums, wire + block.payload + first / 8);
        });
      }
      finish(block, sums, wire);
    }
  }

  // Calls `put(i, value)` for every element of a payload.
  template <typename T, typename Put>
  static TORCHBAGUA_ELEMENT void put_each(SignedScale<T> scale, const uint8_t* payload, long long length,
                                          const Put& put) {
    long long first = 0;
    for (; first + kLanes <= length; first += kLanes) {
      const uint32_t signs = read_signs(payload + first / 8, 4);
#pragma omp simd
      for (long long lane = 0; lane < kLanes; ++lane) {
        put(first + lane, (signs & kLaneBit.bits[lane]) != 0 ? scale.negative : scale.positive);
      }
    }
    for (; first < length; ++first) {
      put(first, (payload[first / 8] >> (first % 8) & 1) != 0 ? scale.negative : scale.positive);
    }
  }

  template <typename T>
  static TORCHBAGUA_ELEMENT void decode_payload(float scale, const uint8_t* payload, long long length, T* values) {
    put_each(make_signed_scale<T>(scale), payload, length,
             [=](long long k, T value) TORCHBAGUA_INLINED { values[k] = value; });
  }

  template <typename Put>
  static TORCHBAGUA_ELEMENT void decode_each(float scale, const uint8_t* payload, long long length, const Put& put) {
    put_each(make_signed_scale<float>(scale), payload, length, put);
  }

  static TORCHBAGUA_ELEMENT void decode_mean_encode(const Rows& rows, const Table& table, float divisor,
                                                    uint8_t* wire) {
    alignas(64) float mean[kTile];
    for (long long b = 0; b < table.num_blocks; ++b) {
      const Block block = table.blocks[b];
      MagnitudeSums sums;
      for (long long first = 0; first < block.length; first += kTile) {
        const long long length = std::min(kTile, block.length - first);
        mean_of(rows, table, divisor, b, 1, first, [&](long long) TORCHBAGUA_INLINED { return mean; });
        scan(mean, length, sums, wire + block.payload + first / 8);
      }
      finish(block, sums, wire);
    }
  }
};

TORCHBAGUA_CPU_CODEC(Sign1Bit)

}  // namespace torchbagua::cpu
