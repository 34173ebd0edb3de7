// The CPU kernels of torchbagua on the dispatcher, over LibTorch's stable ABI; torchbagua/native/schema.py has the
// schemas. A kernel checks all its arguments before it writes anything: no table and no content of a wire makes it read
// or write outside its tensors.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <string>
#include <vector>

#include "arguments.h"
#include "cpu/instruction_set.h"
#include "cpu/minmax_uint8.h"
#include "cpu/qadam.h"
#include "cpu/sign_1bit.h"

namespace {

namespace cpu = torchbagua::cpu;
using torchbagua::binding::check_codec;
using torchbagua::binding::check_feedback;
using torchbagua::binding::check_forms;
using torchbagua::binding::check_like;
using torchbagua::binding::check_mean;
using torchbagua::binding::check_mean_encode;
using torchbagua::binding::check_weights;
using torchbagua::binding::DeviceType;
using torchbagua::binding::refuse;
using torchbagua::binding::Tensor;
using torchbagua::binding::text_of;
using torchbagua::binding::with_element_of;

constexpr DeviceType kPlace = DeviceType::CPU;

// Chosen when the library is loaded.
const cpu::InstructionSet kInstructionSet = cpu::choose_instruction_set();

bool lies_within(int64_t first, int64_t length, int64_t size) {
  return first >= 0 && length >= 0 && length <= size && first <= size - length;  // `first + length` might overflow
}

// Pass kAnyStart for `num_elements` where no x is indexed.
constexpr int64_t kAnyStart = -1;

template <typename Codec>
cpu::Table check_rows(const char* op, const Tensor& table, int64_t num_elements, int64_t wire_bytes) {
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
  check_codec(kOp, kPlace, x, table, wire);
  const cpu::Table checked = check_rows<Codec>(kOp, table, x.numel(), wire.numel());
  auto* bytes = static_cast<uint8_t*>(wire.mutable_data_ptr());
  with_element_of(x, [&](auto element) {
    const auto* values = static_cast<const decltype(element)*>(x.const_data_ptr());
    cpu::run_under(kInstructionSet, [=]() TORCHBAGUA_INLINED { Codec::encode(values, checked, bytes); });
  });
}

template <typename Codec>
void decode(const Tensor& wire, const Tensor& table, const Tensor& x) {
  constexpr const char* kOp = kNames<Codec>.decode;
  check_codec(kOp, kPlace, x, table, wire);
  const cpu::Table checked = check_rows<Codec>(kOp, table, x.numel(), wire.numel());
  const auto* bytes = static_cast<const uint8_t*>(wire.const_data_ptr());
  with_element_of(x, [&](auto element) {
    auto* values = static_cast<decltype(element)*>(x.mutable_data_ptr());
    cpu::run_under(kInstructionSet, [=]() TORCHBAGUA_INLINED { cpu::decode<Codec>(bytes, checked, values); });
  });
}

cpu::Senders senders_of(const Tensor& rows, float divisor) {
  return cpu::Senders{static_cast<const uint8_t*>(rows.const_data_ptr()), rows.size(0), rows.size(1), divisor};
}

template <typename Codec>
void decode_mean(const Tensor& rows, const Tensor& table, double divisor, const Tensor& x) {
  constexpr const char* kOp = kNames<Codec>.decode_mean;
  const cpu::Senders senders = senders_of(rows, check_mean(kOp, kPlace, rows, table, divisor, x));
  const cpu::Table checked = check_rows<Codec>(kOp, table, x.numel(), rows.size(1));
  auto* values = static_cast<float*>(x.mutable_data_ptr());
  cpu::run_under(kInstructionSet, [=]() TORCHBAGUA_INLINED { cpu::decode_mean<Codec>(senders, checked, values); });
}

template <typename Codec>
void decode_mean_encode(const Tensor& rows, const Tensor& table, double divisor, const Tensor& wire) {
  constexpr const char* kOp = kNames<Codec>.decode_mean_encode;
  const cpu::Senders senders = senders_of(rows, check_mean_encode(kOp, kPlace, rows, table, divisor, wire));
  const cpu::Table checked = check_rows<Codec>(kOp, table, kAnyStart, wire.numel());
  auto* bytes = static_cast<uint8_t*>(wire.mutable_data_ptr());
  cpu::run_under(kInstructionSet, [=]() TORCHBAGUA_INLINED { Codec::decode_mean_encode(senders, checked, bytes); });
}

template <typename Codec>
void encode_feedback(const Tensor& x, const Tensor& residual, const Tensor& table, const Tensor& wire,
                     const Tensor& left_out) {
  constexpr const char* kOp = kNames<Codec>.encode_feedback;
  check_feedback(kOp, kPlace, x, residual, table, wire, left_out);
  const cpu::Table checked = check_rows<Codec>(kOp, table, x.numel(), wire.numel());
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
  const torchbagua::QAdamStep step = torchbagua::make_qadam_step(gradient_sign, weight_decay, shrink, beta1,
                                                                 root_correction2, eps, largest_ratio, step_size);
  check_like(kOp, "gradients", gradients, weights);
  check_like(kOp, "momenta", momenta, weights);
  check_like(kOp, "second_moments", second_moments, weights);
  check_weights(kOp, kPlace, weights);
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
  check_forms(kOp, kPlace, kToMomenta ? "gradients" : "averages", values, momenta);
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
