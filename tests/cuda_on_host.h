// What a host's compiler lacks to take csrc_cuda/kernels/*.cuh, and what runs a kernel there: a thread block after the
// other, its threads in turns, each until it waits for the others. A wait that not all threads come to ends the run.
#pragma once

#include <ucontext.h>

#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __shared__ static  // one thread block runs at a time
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct Dim3 {
  unsigned int x, y, z;
};

Dim3 blockIdx, threadIdx, blockDim, gridDim;

namespace cuda_on_host {

enum Outcome { kDone = 0, kTrapped = 1, kStuck = 2 };

struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(256 << 10);
  long long num_waits_of_all = 0;
  long long num_waits_of_warp = 0;
  unsigned int exchanged = 0;
  bool is_done = false;
};

inline std::vector<Thread> threads;
inline std::function<void()> body;
inline ucontext_t scheduler;
inline bool has_trapped = false;

inline Thread& own() { return threads[threadIdx.x]; }

inline void yield() {
  const Dim3 index = threadIdx;
  swapcontext(&own().context, &scheduler);
  threadIdx = index;
}

// Waits until the threads [begin, end) for which `is_of` have all waited as often as this one.
template <typename IsOf>
void wait(size_t begin, size_t end, long long Thread::* num_waits, const IsOf& is_of) {
  const long long count = ++(own().*num_waits);
  for (bool are_there = false; !are_there;) {
    yield();
    are_there = true;
    for (size_t i = begin; i < end; ++i) {
      are_there = are_there && (!is_of(i - begin) || threads[i].*num_waits >= count);
    }
  }
}

inline void wait_for_lanes(unsigned int lanes) {
  const size_t begin = threadIdx.x / 32 * 32;
  wait(begin, begin + 32, &Thread::num_waits_of_warp, [=](size_t lane) { return lanes >> lane & 1; });
}

inline void enter() {
  body();
  own().is_done = true;
  swapcontext(&own().context, &scheduler);
}

// Runs one thread block; a round of turns in which no thread gets further is the last.
inline Outcome run_block(unsigned int num_threads) {
  threads = std::vector<Thread>(num_threads);
  for (Thread& thread : threads) {
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    makecontext(&thread.context, enter, 0);
  }
  const auto progress = [] {
    long long sum = 0;
    for (const Thread& thread : threads) {
      sum += thread.num_waits_of_all + thread.num_waits_of_warp + thread.is_done;
    }
    return sum;
  };
  for (int num_idle_rounds = 0; num_idle_rounds < 3;) {
    const long long before = progress();
    bool is_done = true;
    for (unsigned int i = num_threads; i-- > 0;) {
      if (!threads[i].is_done) {
        is_done = false;
        threadIdx.x = i;
        swapcontext(&scheduler, &threads[i].context);
        if (has_trapped) {
          return kTrapped;
        }
      }
    }
    if (is_done) {
      return kDone;
    }
    num_idle_rounds = progress() == before ? num_idle_rounds + 1 : 0;
  }
  return kStuck;
}

template <auto kKernel>
struct Host;

template <typename... Arguments, void (*kKernel)(Arguments...)>
struct Host<kKernel> {
  // Runs the thread blocks [first, last) of a grid.
  static int run(unsigned int first, unsigned int last, unsigned int grid, unsigned int num_threads,
                 Arguments... arguments) {
    body = [=] { kKernel(arguments...); };
    has_trapped = false;
    gridDim.x = grid;
    blockDim.x = num_threads;
    for (unsigned int block = last; block-- > first;) {
      blockIdx.x = block;
      if (const Outcome outcome = run_block(num_threads); outcome != kDone) {
        return outcome;
      }
    }
    return kDone;
  }
};

}  // namespace cuda_on_host

inline void __syncthreads() {
  cuda_on_host::wait(0, cuda_on_host::threads.size(), &cuda_on_host::Thread::num_waits_of_all,
                     [](size_t) { return true; });
}

template <typename Value>
Value cuda_on_host_exchange(unsigned int lanes, Value value, unsigned int from) {
  static_assert(sizeof(Value) == sizeof(unsigned int));
  std::memcpy(&cuda_on_host::own().exchanged, &value, sizeof(Value));
  cuda_on_host::wait_for_lanes(lanes);
  std::memcpy(&value, &cuda_on_host::threads[from].exchanged, sizeof(Value));
  cuda_on_host::wait_for_lanes(lanes);
  return value;
}

template <typename Value>
Value __shfl_xor_sync(unsigned int lanes, Value value, int mask) {
  return cuda_on_host_exchange(lanes, value, threadIdx.x ^ mask);
}

template <typename Value>
Value __shfl_sync(unsigned int lanes, Value value, int lane) {
  return cuda_on_host_exchange(lanes, value, threadIdx.x / 32 * 32 + lane);
}

inline unsigned int __ballot_sync(unsigned int lanes, int is_set) {
  cuda_on_host::own().exchanged = is_set != 0;
  cuda_on_host::wait_for_lanes(lanes);
  unsigned int result = 0;
  for (unsigned int lane = 0; lane < 32; ++lane) {
    result |= (lanes >> lane & 1) * cuda_on_host::threads[threadIdx.x / 32 * 32 + lane].exchanged << lane;
  }
  cuda_on_host::wait_for_lanes(lanes);
  return result;
}

inline int __popc(unsigned int bits) { return __builtin_popcount(bits); }

[[noreturn]] inline void __trap() {
  cuda_on_host::has_trapped = true;
  while (true) {
    cuda_on_host::yield();
  }
}
