// The CPU kernels of torchbagua on the dispatcher, over LibTorch's stable ABI; torchbagua/native/schema.py has the
// schemas. A kernel checks all its arguments before it writes anything: no table and no content of a wire makes it read
// or write outside its tensors.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <limits>
#include <string>
#include <vector>

#include "cpu/arguments.h"
#include "cpu/instruction_set.h"
#include "cpu/minmax_uint8.h"
#include "cpu/qadam.h"
#include "cpu/sign_1bit.h"

namespace {

namespace cpu = torchbagua::cpu;
using cpu::check_bytes;
using cpu::check_floats;
using cpu::check_like;
using cpu::describe;
using cpu::is_plain;
using cpu::kAnyStart;
using cpu::lies_within;
using cpu::refuse;
using cpu::ScalarType;
using cpu::Tensor;
using cpu::text_of;
using cpu::with_element_of;
using cpu::with_element_of_x;

// Chosen when the library is loaded.
const cpu::InstructionSet kInstructionSet = cpu::choose_instruction_set();

template <typename Codec>
cpu::Table check_table(const char* op, const Tensor& table, int64_t num_elements, int64_t wire_bytes) {
  if (!is_plain(table, 2) || table.scalar_type() != ScalarType::Long || table.size(1) != 4) {
    refuse(op, "table", "contiguous int64 [B, 4]", describe(table));
  }
  const cpu::Table result{static_cast<const cpu::Block*>(table.const_data_ptr()), table.size(0)};
#ifndef TORCHBAGUA_UNCHECKED_TABLES  // defined by the sanitizer test alone, to show that it would see an overrun
  for (int64_t b = 0; b < result.num_blocks; ++b) {
    const cpu::Block& block = result.blocks[b];
    const bool x_holds_it = num_elements == kAnyStart || lies_within(block.start, block.length, num_elements);
    const bool wire_holds_it = lies_within(block.header, sizeof(typename Codec::Header), wire_bytes) &&
                               lies_within(block.payload, Codec::payload_bytes(block.length), wire_bytes);
    if (block.length < 1 || block.header % 4 != 0 || !x_holds_it || !wire_holds_it) {
      const std::string elements = num_elements == kAnyStart ? "" : text_of(num_elements, " elements of x and ");
      refuse(op, "table",
             text_of("rows (start, length >= 1, header at a multiple of 4, payload) of blocks within ", elements,
                     wire_bytes, " bytes of wire"),
             text_of("row ", b, " = (", block.start, ", ", block.length, ", ", block.header, ", ", block.payload, ")"));
    }
  }
#endif
  return result;
}

struct OperationNames {
  const char* encode;
  const char* decode;
  const char* decode_mean;
  const char* decode_mean_encode;
  const char* encode_feedback;
};

template <typename Codec>
constexpr OperationNames kNames{};
template <>
constexpr OperationNames kNames<cpu::MinMaxUInt8>{"minmax_uint8_encode", "minmax_uint8_decode",
                                                  "minmax_uint8_decode_mean", "minmax_uint8_decode_mean_encode",
                                                  "minmax_uint8_encode_feedback"};
template <>
constexpr OperationNames kNames<cpu::Sign1Bit>{"sign_1bit_encode", "sign_1bit_decode", "sign_1bit_decode_mean",
                                               "sign_1bit_decode_mean_encode", "sign_1bit_encode_feedback"};

template <typename Codec>
void encode(const Tensor& x, const Tensor& table, const Tensor& wire) {
  constexpr const char* kOp = kNames<Codec>.encode;
  with_element_of_x(kOp, x, [&](auto element) {
    check_bytes(kOp, "wire", wire, 1);
    const cpu::Table checked = check_table<Codec>(kOp, table, x.numel(), wire.numel());
    const auto* values = static_cast<const decltype(element)*>(x.const_data_ptr());
    auto* bytes = static_cast<uint8_t*>(wire.mutable_data_ptr());
    cpu::run_under(kInstructionSet, [=]() TORCHBAGUA_INLINED { Codec::encode(values, checked, bytes); });
  });
}

template <typename Codec>
void decode(const Tensor& wire, const Tensor& table, const Tensor& x) {
  constexpr const char* kOp = kNames<Codec>.decode;
  with_element_of_x(kOp, x, [&](auto element) {
    check_bytes(kOp, "wire", wire, 1);
    const cpu::Table checked = check_table<Codec>(kOp, table, x.numel(), wire.numel());
    const auto* bytes = static_cast<const uint8_t*>(wire.const_data_ptr());
    auto* values = static_cast<decltype(element)*>(x.mutable_data_ptr());
    cpu::run_under(kInstructionSet, [=]() TORCHBAGUA_INLINED { cpu::decode<Codec>(bytes, checked, values); });
  });
}

cpu::Senders check_senders(const char* op, const Tensor& rows, double divisor) {
  check_bytes(op, "rows", rows, 2);
  if (rows.size(0) < 1) {
    refuse(op, "rows", "of at least one row", describe(rows));
  }
  const float rounded = static_cast<float>(divisor);
  if (!(rounded > 0.0f && rounded <= std::numeric_limits<float>::max())) {
    refuse(op, "divisor", "a positive finite float32", text_of(divisor));
  }
  return cpu::Senders{static_cast<const uint8_t*>(rows.const_data_ptr()), rows.size(0), rows.size(1), rounded};
}

template <typename Codec>
void decode_mean(const Tensor& rows, const Tensor& table, double divisor, const Tensor& x) {
  constexpr const char* kOp = kNames<Codec>.decode_mean;
  const cpu::Senders senders = check_senders(kOp, rows, divisor);
  check_floats(kOp, "x", x, kAnyStart);
  const cpu::Table checked = check_table<Codec>(kOp, table, x.numel(), rows.size(1));
  auto* values = static_cast<float*>(x.mutable_data_ptr());
  cpu::run_under(kInstructionSet, [=]() TORCHBAGUA_INLINED { cpu::decode_mean<Codec>(senders, checked, values); });
}

template <typename Codec>
void decode_mean_encode(const Tensor& rows, const Tensor& table, double divisor, const Tensor& wire) {
  constexpr const char* kOp = kNames<Codec>.decode_mean_encode;
  const cpu::Senders senders = check_senders(kOp, rows, divisor);
  check_bytes(kOp, "wire", wire, 1);
  if (wire.numel() != rows.size(1)) {
    refuse(kOp, "wire", text_of("as long as a row, ", rows.size(1), " bytes"), describe(wire));
  }
  const cpu::Table checked = check_table<Codec>(kOp, table, kAnyStart, wire.numel());
  auto* bytes = static_cast<uint8_t*>(wire.mutable_data_ptr());
  cpu::run_under(kInstructionSet, [=]() TORCHBAGUA_INLINED { Codec::decode_mean_encode(senders, checked, bytes); });
}

template <typename Codec>
void encode_feedback(const Tensor& x, const Tensor& residual, const Tensor& table, const Tensor& wire,
                     const Tensor& left_out) {
  constexpr const char* kOp = kNames<Codec>.encode_feedback;
  check_floats(kOp, "x", x, kAnyStart);
  check_floats(kOp, "residual", residual, x.numel());
  check_floats(kOp, "left_out", left_out, x.numel());
  check_bytes(kOp, "wire", wire, 1);
  const cpu::Table checked = check_table<Codec>(kOp, table, x.numel(), wire.numel());
  const auto* values = static_cast<const float*>(x.const_data_ptr());
  const auto* left_before = static_cast<const float*>(residual.const_data_ptr());
  auto* bytes = static_cast<uint8_t*>(wire.mutable_data_ptr());
  auto* left = static_cast<float*>(left_out.mutable_data_ptr());
  cpu::run_under(kInstructionSet,
                 [=]() TORCHBAGUA_INLINED { cpu::encode_feedback<Codec>(values, left_before, checked, bytes, left); });
}

// Elements that a thread takes at least: less is not worth waking it.
constexpr int64_t kGrain = 1 << 15;

void qadam_update(const std::vector<Tensor>& weights, const std::vector<Tensor>& gradients,
                  const std::vector<Tensor>& momenta, const std::vector<Tensor>& second_moments, double gradient_sign,
                  double weight_decay, double shrink, double beta1, double root_correction2, double eps,
                  double largest_ratio, double step_size) {
  constexpr const char* kOp = "qadam_update";
  const torchbagua::QAdamStep step{
      static_cast<float>(gradient_sign), static_cast<float>(weight_decay),  static_cast<float>(shrink),
      static_cast<float>(beta1),         static_cast<float>(1.0 - beta1),   static_cast<float>(root_correction2),
      static_cast<float>(eps),           static_cast<float>(largest_ratio), static_cast<float>(step_size)};
  check_like(kOp, "gradients", gradients, weights);
  check_like(kOp, "momenta", momenta, weights);
  check_like(kOp, "second_moments", second_moments, weights);
  for (const Tensor& weight : weights) {
    if (!weight.is_cpu() || !weight.is_contiguous() || !with_element_of(weight, [](auto) {})) {
      refuse(kOp, "weights", "contiguous float32, bfloat16 or float16", describe(weight));
    }
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    with_element_of(weights[i], [&](auto element) {
      using Element = decltype(element);
      const cpu::QAdamTensors<Element> tensors{static_cast<Element*>(weights[i].mutable_data_ptr()),
                                               static_cast<const Element*>(gradients[i].const_data_ptr()),
                                               static_cast<Element*>(momenta[i].mutable_data_ptr()),
                                               static_cast<const Element*>(second_moments[i].const_data_ptr())};
      torch::stable::parallel_for(0, weights[i].numel(), kGrain, [&](int64_t begin, int64_t end) {
        cpu::run_under(kInstructionSet, [&]() TORCHBAGUA_INLINED { cpu::qadam_update(step, tensors, begin, end); });
      });
    });
  }
}

// qadam_form_momenta, or qadam_form_gradients.
template <bool kToMomenta>
void qadam_change_form(const std::vector<Tensor>& values, const std::vector<Tensor>& momenta, double beta1,
                       double share) {
  constexpr const char* kOp = kToMomenta ? "qadam_form_momenta" : "qadam_form_gradients";
  constexpr const char* kValues = kToMomenta ? "gradients" : "averages";
  if (momenta.size() != values.size()) {
    refuse(kOp, "momenta", text_of("a list of ", values.size(), " tensors"), text_of("a list of ", momenta.size()));
  }
  for (size_t i = 0; i < values.size(); ++i) {
    check_floats(kOp, kValues, values[i], kAnyStart);
    if (!is_plain(momenta[i], 1) || momenta[i].numel() != values[i].numel() ||
        !with_element_of(momenta[i], [](auto) {})) {
      refuse(kOp, "momenta", text_of("contiguous float32, bfloat16 or float16 [", values[i].numel(), "]"),
             describe(momenta[i]));
    }
  }
  const float own_beta1 = static_cast<float>(beta1);
  const float own_share = static_cast<float>(share);
  for (size_t i = 0; i < values.size(); ++i) {
    with_element_of(momenta[i], [&](auto element) {
      auto* data = static_cast<float*>(values[i].mutable_data_ptr());
      const auto* momentum = static_cast<const decltype(element)*>(momenta[i].const_data_ptr());
      torch::stable::parallel_for(0, values[i].numel(), kGrain, [=](int64_t begin, int64_t end) {
        cpu::run_under(kInstructionSet, [=]() TORCHBAGUA_INLINED {
          cpu::change_form<kToMomenta>(data, momentum, own_beta1, own_share, begin, end);
        });
      });
    });
  }
}

std::string cpu_instruction_set() { return cpu::name_of(kInstructionSet); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchbagua, CPU, library) {
  library.impl(kNames<cpu::MinMaxUInt8>.encode, TORCH_BOX(&encode<cpu::MinMaxUInt8>));
  library.impl(kNames<cpu::MinMaxUInt8>.decode, TORCH_BOX(&decode<cpu::MinMaxUInt8>));
  library.impl(kNames<cpu::MinMaxUInt8>.decode_mean, TORCH_BOX(&decode_mean<cpu::MinMaxUInt8>));
  library.impl(kNames<cpu::MinMaxUInt8>.decode_mean_encode, TORCH_BOX(&decode_mean_encode<cpu::MinMaxUInt8>));
  library.impl(kNames<cpu::MinMaxUInt8>.encode_feedback, TORCH_BOX(&encode_feedback<cpu::MinMaxUInt8>));
  library.impl(kNames<cpu::Sign1Bit>.encode, TORCH_BOX(&encode<cpu::Sign1Bit>));
  library.impl(kNames<cpu::Sign1Bit>.decode, TORCH_BOX(&decode<cpu::Sign1Bit>));
  library.impl(kNames<cpu::Sign1Bit>.decode_mean, TORCH_BOX(&decode_mean<cpu::Sign1Bit>));
  library.impl(kNames<cpu::Sign1Bit>.decode_mean_encode, TORCH_BOX(&decode_mean_encode<cpu::Sign1Bit>));
  library.impl(kNames<cpu::Sign1Bit>.encode_feedback, TORCH_BOX(&encode_feedback<cpu::Sign1Bit>));
  library.impl("qadam_form_momenta", TORCH_BOX(&qadam_change_form<true>));
  library.impl("qadam_form_gradients", TORCH_BOX(&qadam_change_form<false>));
  library.impl("qadam_update", TORCH_BOX(&qadam_update));
}

// An operation without a tensor has no device to be dispatched on.
STABLE_TORCH_LIBRARY_IMPL(torchbagua, CompositeExplicitAutograd, library) {
  library.impl("cpu_instruction_set", TORCH_BOX(&cpu_instruction_set));
}
