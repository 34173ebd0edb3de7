// The operations of a codec on the dispatcher, over LibTorch's stable ABI; torchbagua/native/block_format.py documents
// them. This file checks their arguments and converts them, in the order of the operation, to what kernels take.
#pragma once

#include <torch/csrc/stable/library.h>

#include <string>

#include "arguments.h"
#include "momenta_arguments.h"

namespace torchbagua::binding {

// `Kernels` has kName, the prefix of the operations' names; kDevice, the device type; kFields, the number of fields in
// a row of a table; and a function for each operation on its device, which takes the call and the arguments, with the
// content of tables unchecked.
template <typename Kernels>
struct CodecOps {
  static Call call(const char* name, const Tensor& first) { return {{Kernels::kName, name}, Kernels::kDevice, first}; }

  // Arguments are checked in order, as in plain torch.
  static void encode(const Tensor& x, const Tensor& table, const Tensor& wire) {
    const Call called = call("encode", x);
    with_element_of(called, {"x", x}, [&](auto element) {
      const auto values = span_of<const decltype(element)>(called, {"x", x});
      const Table blocks = table_of(called, table, Kernels::kFields);
      Kernels::encode(called, values, blocks, span_of<unsigned char>(called, {"wire", wire}));
    });
  }

  static void decode(const Tensor& wire, const Tensor& table, const Tensor& x) {
    const Call called = call("decode", wire);
    const auto bytes = span_of<const unsigned char>(called, {"wire", wire});
    const Table blocks = table_of(called, table, Kernels::kFields);
    with_element_of(called, {"x", x}, [&](auto element) {
      Kernels::decode(called, bytes, blocks, span_of<decltype(element)>(called, {"x", x}));
    });
  }

  static void decode_mean(const Tensor& rows, const Tensor& table, double divisor, const Tensor& x) {
    const Call called = call("decode_mean", rows);
    const Rows wires = rows_of(called, rows);
    const Table blocks = table_of(called, table, Kernels::kFields);
    const float by = divisor_of(called, divisor);
    Kernels::decode_mean(called, wires, blocks, by, span_of<float>(called, {"x", x}));
  }

  static void decode_mean_encode(const Tensor& rows, const Tensor& table, double divisor, const Tensor& wire) {
    const Call called = call("decode_mean_encode", rows);
    const Rows wires = rows_of(called, rows);
    const Table blocks = table_of(called, table, Kernels::kFields);
    const float by = divisor_of(called, divisor);
    Kernels::decode_mean_encode(called, wires, blocks, by,
                                span_of<unsigned char>(called, {"wire", wire, wires.row_bytes}));
  }

  static void encode_feedback(const Tensor& x, const Tensor& residual, const Tensor& table, const Tensor& wire,
                              const Tensor& left_out) {
    const Call called = call("encode_feedback", x);
    const auto values = span_of<const float>(called, {"x", x});
    const auto left_before = span_of<const float>(called, {"residual", residual, values.size});
    const Table blocks = table_of(called, table, Kernels::kFields);
    const auto bytes = span_of<unsigned char>(called, {"wire", wire});
    Kernels::encode_feedback(called, values, left_before, blocks, bytes,
                             span_of<float>(called, {"left_out", left_out, values.size}));
  }

  static void decode_mean_encode_feedback(const Tensor& rows, const Tensor& table, double divisor,
                                          const Tensor& residual, const Tensor& wire, const Tensor& left_out) {
    const Call called = call("decode_mean_encode_feedback", rows);
    const Rows wires = rows_of(called, rows);
    const Table blocks = table_of(called, table, Kernels::kFields);
    const float by = divisor_of(called, divisor);
    const auto left_before = span_of<const float>(called, {"residual", residual});
    const auto bytes = span_of<unsigned char>(called, {"wire", wire, wires.row_bytes});
    Kernels::decode_mean_encode_feedback(called, wires, blocks, by, left_before, bytes,
                                         span_of<float>(called, {"left_out", left_out, left_before.size}));
  }

  static void encode_momenta(const Tensor& gradients, const Tensor& table, const Tensor& wire, const Tensors& momenta,
                             const Numbers& beta1s, const Numbers& shares) {
    const Call called = call("encode_momenta", gradients);
    const auto values = span_of<const float>(called, {"gradients", gradients});
    const Table blocks = table_of(called, table, Kernels::kFields);
    const auto bytes = span_of<unsigned char>(called, {"wire", wire});
    Kernels::encode_momenta(called, values, {nullptr, 0}, blocks, bytes, {nullptr, 0},
                            momenta_of(called, momenta, beta1s, shares, values.size));
  }

  static void encode_momenta_feedback(const Tensor& gradients, const Tensor& residual, const Tensor& table,
                                      const Tensor& wire, const Tensor& left_out, const Tensors& momenta,
                                      const Numbers& beta1s, const Numbers& shares) {
    const Call called = call("encode_momenta_feedback", gradients);
    const auto values = span_of<const float>(called, {"gradients", gradients});
    const auto left_before = span_of<const float>(called, {"residual", residual, values.size});
    const Table blocks = table_of(called, table, Kernels::kFields);
    const auto bytes = span_of<unsigned char>(called, {"wire", wire});
    const auto left_after = span_of<float>(called, {"left_out", left_out, values.size});
    Kernels::encode_momenta(called, values, left_before, blocks, bytes, left_after,
                            momenta_of(called, momenta, beta1s, shares, values.size));
  }

  static void decode_gradients(const Tensor& wire, const Tensor& table, const Tensor& gradients, const Tensors& momenta,
                               const Numbers& beta1s, const Numbers& shares) {
    const Call called = call("decode_gradients", wire);
    const auto bytes = span_of<const unsigned char>(called, {"wire", wire});
    const Table blocks = table_of(called, table, Kernels::kFields);
    const auto values = span_of<float>(called, {"gradients", gradients});
    Kernels::decode_gradients(called, bytes, blocks, values, momenta_of(called, momenta, beta1s, shares, values.size));
  }

  template <typename Library>
  static void register_in(Library& library) {
    const std::string name = Kernels::kName;
    library.impl((name + "_encode").c_str(), TORCH_BOX(&CodecOps::encode));
    library.impl((name + "_decode").c_str(), TORCH_BOX(&CodecOps::decode));
    library.impl((name + "_decode_mean").c_str(), TORCH_BOX(&CodecOps::decode_mean));
    library.impl((name + "_decode_mean_encode").c_str(), TORCH_BOX(&CodecOps::decode_mean_encode));
    library.impl((name + "_encode_feedback").c_str(), TORCH_BOX(&CodecOps::encode_feedback));
    if constexpr (Kernels::kDevice == DeviceType::CPU) {  // a GPU has no cache to keep a mean in
      library.impl((name + "_decode_mean_encode_feedback").c_str(), TORCH_BOX(&CodecOps::decode_mean_encode_feedback));
    }
    if constexpr (Kernels::kCodesMomenta) {
      library.impl((name + "_encode_momenta").c_str(), TORCH_BOX(&CodecOps::encode_momenta));
      library.impl((name + "_encode_momenta_feedback").c_str(), TORCH_BOX(&CodecOps::encode_momenta_feedback));
      library.impl((name + "_decode_gradients").c_str(), TORCH_BOX(&CodecOps::decode_gradients));
    }
  }
};

}  // namespace torchbagua::binding
