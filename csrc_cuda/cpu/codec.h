// A codec's operations on the CPU. All blocks of a table are checked before anything is written: no table and no
// content of a wire makes a kernel read or write outside its tensors.
//
// Codecs run on the calling thread only: a rank encodes on its lane thread while backward runs, and more threads would
// be taken from backward. QAdam's update runs while nothing else does, and uses several threads.
#pragma once

#include <string>
#include <type_traits>

#include "blocks.h"
#include "codec_ops.h"
#include "instruction_set.h"
#include "momenta.h"

namespace torchbagua::cpu {

// The rows of a codec's tables. By default, for a codec that encodes all elements of a block.
template <typename Codec, typename = void>
struct RowsOf {
  static constexpr int64_t kFields = 4;

  static bool is_inside_of(const Table& table, long long b, long long num_elements, long long wire_bytes) {
    const Block& block = table.blocks[b];
    return is_inside(block, Codec::kHeaderBytes, Codec::payload_bytes(block.length), num_elements, wire_bytes);
  }

  static std::string allowed_rows() { return "rows (start, length >= 1, header at a multiple of 4, payload)"; }
};

// A codec with different rows defines these members itself.
template <typename Codec>
struct RowsOf<Codec, std::void_t<decltype(Codec::kFields)>> : Codec {};

template <typename Codec>
struct OnCpu {
  using Call = binding::Call;

  static constexpr const char* kName = Codec::kName;
  static constexpr auto kDevice = binding::DeviceType::CPU;
  static constexpr int64_t kFields = RowsOf<Codec>::kFields;
  static constexpr bool kCodesMomenta = std::is_base_of_v<DenseCodec<Codec>, Codec>;

  template <typename T>
  static void encode(const Call& call, Span<const T> x, Table table, Span<uint8_t> wire) {
    check_blocks(call, table, x.size, wire.size);
    run_under(kInstructionSet, [=]() TORCHBAGUA_INLINED { Codec::encode(x.data, table, wire.data); });
  }

  template <typename T>
  static void decode(const Call& call, Span<const uint8_t> wire, Table table, Span<T> x) {
    check_blocks(call, table, x.size, wire.size);
    run_under(kInstructionSet, [=]() TORCHBAGUA_INLINED { Codec::decode(wire.data, table, x.data); });
  }

  static void decode_mean(const Call& call, Rows rows, Table table, float divisor, Span<float> x) {
    check_blocks(call, table, x.size, rows.row_bytes);
    run_under(kInstructionSet, [=]() TORCHBAGUA_INLINED { Codec::decode_mean(rows, table, divisor, x.data); });
  }

  static void decode_mean_encode(const Call& call, Rows rows, Table table, float divisor, Span<uint8_t> wire) {
    check_blocks(call, table, kAnyStart, wire.size);
    run_under(kInstructionSet,
              [=]() TORCHBAGUA_INLINED { Codec::decode_mean_encode(rows, table, divisor, wire.data); });
  }

  static void encode_feedback(const Call& call, Span<const float> x, Span<const float> residual, Table table,
                              Span<uint8_t> wire, Span<float> left_out) {
    check_blocks(call, table, x.size, wire.size);
    if constexpr (kCodesMomenta) {
      encode_sent({x.data, nullptr, residual.data}, table, wire.data, left_out.data);
    } else {
      run_under(kInstructionSet, [=]() TORCHBAGUA_INLINED {
        Codec::encode_feedback(x.data, residual.data, table, wire.data, left_out.data);
      });
    }
  }

  static void decode_mean_encode_feedback(const Call& call, Rows rows, Table table, float divisor,
                                          Span<const float> residual, Span<uint8_t> wire, Span<float> left_out) {
    check_blocks(call, table, residual.size, wire.size);
    run_under(kInstructionSet, [=]() TORCHBAGUA_INLINED {
      Codec::decode_mean_encode_feedback(rows, table, divisor, residual.data, wire.data, left_out.data);
    });
  }

  // `residual` and `left_out` have null data if there is no error feedback.
  static void encode_momenta(const Call& call, Span<const float> gradients, Span<const float> residual, Table table,
                             Span<uint8_t> wire, Span<float> left_out, const binding::Momenta& momenta) {
    check_blocks(call, table, gradients.size, wire.size);
    encode_sent({gradients.data, &momenta, residual.data}, table, wire.data, left_out.data);
  }

  static void encode_sent(const Sent& sent, const Table& table, uint8_t* wire, float* left_out) {
    run_under(kInstructionSet, [&]() TORCHBAGUA_INLINED { Codec::encode_formed(table, wire, left_out, sent); });
  }

  static void decode_gradients(const Call& call, Span<const uint8_t> wire, Table table, Span<float> gradients,
                               const binding::Momenta& momenta) {
    check_blocks(call, table, gradients.size, wire.size);
    run_under(kInstructionSet,
              [&]() TORCHBAGUA_INLINED { Codec::decode_formed(wire.data, table, gradients.data, Gradients{momenta}); });
  }

  static void check_blocks(const Call& call, const Table& table, long long num_elements, long long wire_bytes) {
#ifndef TORCHBAGUA_UNCHECKED_TABLES  // defined only by the sanitizer test, to show that it would detect an overrun
    for (long long b = 0; b < table.num_blocks; ++b) {
      if (!RowsOf<Codec>::is_inside_of(table, b, num_elements, wire_bytes)) {
        const auto elements = num_elements == kAnyStart ? "" : binding::text_of(num_elements, " elements of x and ");
        const auto* fields = reinterpret_cast<const long long*>(table.blocks) + b * kFields;
        std::string row;
        for (int64_t field = 0; field < kFields; ++field) {
          row += binding::text_of(field == 0 ? "" : ", ", fields[field]);
        }
        refuse(call, "table",
               binding::text_of(RowsOf<Codec>::allowed_rows(), " of blocks within ", elements, wire_bytes,
                                " bytes of wire"),
               binding::text_of("row ", b, " = (", row, ")"));
      }
    }
#endif
  }
};

}  // namespace torchbagua::cpu

// Registers the operations of a codec: the last line of its file.
#define TORCHBAGUA_CPU_CODEC(Codec)                                                     \
  STABLE_TORCH_LIBRARY_IMPL(torchbagua, CPU, library) {                                 \
    torchbagua::binding::CodecOps<torchbagua::cpu::OnCpu<Codec>>::register_in(library); \
  }
