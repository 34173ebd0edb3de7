// The CPU kernels of torchbagua on the dispatcher, over LibTorch's stable ABI; torchbagua/native/schema.py has the
// schemas. A kernel checks all its arguments before it writes anything: no table and no content of a wire makes it read
// or write outside its tensors.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>

#include "cpu/instruction_set.h"
#include "cpu/minmax_uint8.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
namespace cpu = torchbagua::cpu;

// Chosen when the library is loaded.
const cpu::InstructionSet kInstructionSet = cpu::choose_instruction_set();

// Python sees std::invalid_argument as a ValueError.
[[noreturn]] void refuse(const char* op, const char* argument, const std::string& allowed, const std::string& got) {
  throw std::invalid_argument(std::string("torchbagua::") + op + ": " + argument + " must be " + allowed + ", got " +
                              got);
}

template <typename... Parts>
std::string text_of(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

std::string describe(const Tensor& tensor) {
  std::string shape;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    shape += text_of(i == 0 ? "" : ", ", tensor.size(i));
  }
  return text_of(tensor.is_contiguous() ? "" : "non-contiguous ", toString(tensor.scalar_type()), " [", shape, "] on ",
                 tensor.is_cpu() ? "the CPU" : "another device");
}

// What every access to a tensor's data rests on.
bool is_plain(const Tensor& tensor, int64_t num_dims) {
  return tensor.is_cpu() && tensor.dim() == num_dims && tensor.is_contiguous();
}

void check_bytes(const char* op, const char* argument, const Tensor& tensor, int64_t num_dims) {
  if (!is_plain(tensor, num_dims) || tensor.scalar_type() != ScalarType::Byte) {
    refuse(op, argument, text_of("contiguous uint8 ", num_dims == 1 ? "[W]" : "[R, W]"), describe(tensor));
  }
}

bool lies_within(int64_t first, int64_t length, int64_t size) {
  return first >= 0 && length <= size && first <= size - length;  // `first + length` might overflow
}

// Pass kAnyStart for `num_elements` where no x is indexed.
constexpr int64_t kAnyStart = -1;

cpu::Table check_table(const char* op, const Tensor& table, int64_t num_elements, int64_t wire_bytes) {
  if (!is_plain(table, 2) || table.scalar_type() != ScalarType::Long || table.size(1) != 4) {
    refuse(op, "table", "contiguous int64 [B, 4]", describe(table));
  }
  const cpu::Table result{static_cast<const cpu::Block*>(table.const_data_ptr()), table.size(0)};
#ifndef TORCHBAGUA_UNCHECKED_TABLES  // defined by the sanitizer test alone, to show that it would see an overrun
  for (int64_t b = 0; b < result.num_blocks; ++b) {
    const cpu::Block& block = result.blocks[b];
    const bool x_holds_it = num_elements == kAnyStart || lies_within(block.start, block.length, num_elements);
    const bool wire_holds_it = lies_within(block.header, cpu::kHeaderBytes, wire_bytes) &&
                               lies_within(block.payload, block.length, wire_bytes);
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

// Calls `body` with a value of the element type of x.
template <typename Body>
void with_element_of(const char* op, const Tensor& x, const Body& body) {
  if (is_plain(x, 1)) {
    switch (x.scalar_type()) {
      case ScalarType::Float:
        return body(float{});
      case ScalarType::BFloat16:
        return body(torchbagua::BFloat16{});
      case ScalarType::Half:
        return body(torchbagua::Float16{});
      default:
        break;
    }
  }
  refuse(op, "x", "contiguous float32, bfloat16 or float16 [N]", describe(x));
}

void encode(const Tensor& x, const Tensor& table, const Tensor& wire) {
  constexpr const char* kOp = "minmax_uint8_encode";
  with_element_of(kOp, x, [&](auto element) {
    check_bytes(kOp, "wire", wire, 1);
    const cpu::Table checked = check_table(kOp, table, x.numel(), wire.numel());
    const auto* values = static_cast<const decltype(element)*>(x.const_data_ptr());
    auto* bytes = static_cast<uint8_t*>(wire.mutable_data_ptr());
    cpu::run_under(kInstructionSet, [=]() TORCHBAGUA_INLINED { cpu::encode(values, checked, bytes); });
  });
}

void decode(const Tensor& wire, const Tensor& table, const Tensor& x) {
  constexpr const char* kOp = "minmax_uint8_decode";
  with_element_of(kOp, x, [&](auto element) {
    check_bytes(kOp, "wire", wire, 1);
    const cpu::Table checked = check_table(kOp, table, x.numel(), wire.numel());
    const auto* bytes = static_cast<const uint8_t*>(wire.const_data_ptr());
    auto* values = static_cast<decltype(element)*>(x.mutable_data_ptr());
    cpu::run_under(kInstructionSet, [=]() TORCHBAGUA_INLINED { cpu::decode(bytes, checked, values); });
  });
}

void decode_mean_encode(const Tensor& rows, const Tensor& table, double divisor, const Tensor& wire) {
  constexpr const char* kOp = "minmax_uint8_decode_mean_encode";
  check_bytes(kOp, "rows", rows, 2);
  check_bytes(kOp, "wire", wire, 1);
  if (rows.size(0) < 1) {
    refuse(kOp, "rows", "of at least one row", describe(rows));
  }
  if (wire.numel() != rows.size(1)) {
    refuse(kOp, "wire", text_of("as long as a row, ", rows.size(1), " bytes"), describe(wire));
  }
  const float rounded = static_cast<float>(divisor);
  if (!(rounded > 0.0f && rounded <= std::numeric_limits<float>::max())) {
    refuse(kOp, "divisor", "a positive finite float32", text_of(divisor));
  }
  const cpu::Table checked = check_table(kOp, table, kAnyStart, wire.numel());
  const cpu::Senders senders{static_cast<const uint8_t*>(rows.const_data_ptr()), rows.size(0), rows.size(1), rounded};
  auto* bytes = static_cast<uint8_t*>(wire.mutable_data_ptr());
  cpu::run_under(kInstructionSet, [=]() TORCHBAGUA_INLINED { cpu::decode_mean_encode(senders, checked, bytes); });
}

std::string cpu_instruction_set() { return cpu::name_of(kInstructionSet); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchbagua, CPU, library) {
  library.impl("minmax_uint8_encode", TORCH_BOX(&encode));
  library.impl("minmax_uint8_decode", TORCH_BOX(&decode));
  library.impl("minmax_uint8_decode_mean_encode", TORCH_BOX(&decode_mean_encode));
}

// An operation without a tensor has no device to be dispatched on.
STABLE_TORCH_LIBRARY_IMPL(torchbagua, CompositeExplicitAutograd, library) {
  library.impl("cpu_instruction_set", TORCH_BOX(&cpu_instruction_set));
}
