// A codec's operations on CUDA: each launches one kernel over the rows of its table and does not wait. The kernel
// checks the content of the table, and traps if it is invalid.
#pragma once

#include "codec_ops.h"
#include "kernels/blocks.cuh"
#include "launch.h"

namespace torchbagua::cuda {

// One kernel per element type.
template <typename Float32, typename Brain16, typename Half16>
struct KernelOfType {
  Float32* float32;
  Brain16* bfloat16;
  Half16* float16;

  constexpr KernelOfType(Float32* one, Brain16* two, Half16* three) : float32(one), bfloat16(two), float16(three) {}
  constexpr auto* operator()(float) const { return float32; }
  constexpr auto* operator()(BFloat16) const { return bfloat16; }
  constexpr auto* operator()(Float16) const { return float16; }
};

template <typename Float32, typename Brain16, typename Half16>
void add_kernels_of_type(const KernelOfType<Float32, Brain16, Half16>& kernels) {
  add_kernels(kernels.float32, kernels.bfloat16, kernels.float16);
}

#define TORCHBAGUA_KERNEL_OF_TYPE(name) \
  torchbagua::cuda::KernelOfType(&name##_float32, &name##_bfloat16, &name##_float16)

// The operations of a codec with `Kernels`, which TORCHBAGUA_CUDA_CODEC declares; kNumTeams is the number of blocks
// that a thread block processes concurrently.
template <typename Kernels>
struct OnCuda {
  using Call = binding::Call;

  static constexpr const char* kName = Kernels::kName;
  static constexpr auto kDevice = binding::DeviceType::CUDA;
  static constexpr int64_t kFields = Kernels::kFields;
  static constexpr bool kCodesMomenta = false;  // on a GPU, callers run the operations one after the other

  static int64_t num_thread_blocks(const Table& table) {
    return (table.num_blocks + Kernels::kNumTeams - 1) / Kernels::kNumTeams;
  }

  template <typename T>
  static void encode(const Call& call, Span<const T> x, Table table, Span<unsigned char> wire) {
    launch(call, num_thread_blocks(table), kThreads, Kernels::kEncode(T{}), x, table, wire);
  }

  template <typename T>
  static void decode(const Call& call, Span<const unsigned char> wire, Table table, Span<T> x) {
    launch(call, num_thread_blocks(table), kThreads, Kernels::kDecode(T{}), wire, table, x);
  }

  static void decode_mean(const Call& call, Rows rows, Table table, float divisor, Span<float> x) {
    launch(call, num_thread_blocks(table), kThreads, Kernels::kDecodeMean, rows, table, divisor, x);
  }

  static void decode_mean_encode(const Call& call, Rows rows, Table table, float divisor, Span<unsigned char> wire) {
    launch(call, num_thread_blocks(table), kThreads, Kernels::kDecodeMeanEncode, rows, table, divisor, wire);
  }

  static void encode_feedback(const Call& call, Span<const float> x, Span<const float> residual, Table table,
                              Span<unsigned char> wire, Span<float> left_out) {
    launch(call, num_thread_blocks(table), kThreads, Kernels::kEncodeFeedback, x, residual, table, wire, left_out);
  }
};

}  // namespace torchbagua::cuda

// Registers the operations of a codec: the last line of its file in kernels/, which expands to nothing in NVRTC.
#undef TORCHBAGUA_CUDA_CODEC
#undef TORCHBAGUA_CUDA_CODEC_OF_FIELDS
#define TORCHBAGUA_CUDA_CODEC(codec, num_teams) TORCHBAGUA_CUDA_CODEC_OF_FIELDS(codec, num_teams, 4)
#define TORCHBAGUA_CUDA_CODEC_OF_FIELDS(codec, num_teams, num_fields)                               \
  struct codec##_kernels {                                                                          \
    static constexpr const char* kName = #codec;                                                    \
    static constexpr int64_t kNumTeams = num_teams;                                                 \
    static constexpr int64_t kFields = num_fields;                                                  \
    static constexpr auto kEncode = TORCHBAGUA_KERNEL_OF_TYPE(torchbagua_##codec##_encode);         \
    static constexpr auto kDecode = TORCHBAGUA_KERNEL_OF_TYPE(torchbagua_##codec##_decode);         \
    static constexpr auto* kDecodeMean = &torchbagua_##codec##_decode_mean_float32;                 \
    static constexpr auto* kDecodeMeanEncode = &torchbagua_##codec##_decode_mean_encode;            \
    static constexpr auto* kEncodeFeedback = &torchbagua_##codec##_encode_feedback_float32;         \
  };                                                                                                \
  STABLE_TORCH_LIBRARY_IMPL(torchbagua, CUDA, library) {                                            \
    torchbagua::binding::CodecOps<OnCuda<codec##_kernels>>::register_in(library);                   \
    torchbagua::cuda::add_kernels_of_type(codec##_kernels::kEncode);                                \
    torchbagua::cuda::add_kernels_of_type(codec##_kernels::kDecode);                                \
    torchbagua::cuda::add_kernels(codec##_kernels::kDecodeMean, codec##_kernels::kDecodeMeanEncode, \
                                  codec##_kernels::kEncodeFeedback);                                \
  }
