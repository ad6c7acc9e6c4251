// Stands in for csrc/include/punica/primitives.cuh: runs kernels on a CPU, so that their logic is tested without a GPU. The
// threads of a block are fibers of one thread; blocks run one after another. No memory model.
#pragma once

#define __launch_bounds__(...)
#define __grid_constant__
#undef __shared__
#define __shared__ static

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "../fiber.h"
#include "punica/params.h"

using std::max;
using std::min;

struct EmulatedIndex {
  int x = 0;
};
inline EmulatedIndex threadIdx;
inline EmulatedIndex blockIdx;
inline EmulatedIndex gridDim;

namespace emulator {

struct Fiber {
  Context context;
  std::unique_ptr<char[]> stack;
  bool done = false;
};

struct Barrier {
  int arrived = 0;
  uint64_t phase = 0;
};

constexpr int kStackBytes = 128 << 10;
constexpr int kWarp = 32;

struct Block {
  Context scheduler;
  std::vector<Fiber> fibers;
  Barrier all;
  std::vector<Barrier> warps;
  std::vector<std::array<std::array<uint32_t, 6>, kWarp>> exchange;
};

inline Block* block = nullptr;
inline bool waited = true;  // whether every thread has waited for the kernel before; reset by launch
inline int threads_waited = 0;
inline bool stopped = false;    // a thread has stopped the kernel
inline int64_t prefetched = 0;  // sum of the bytes that were asked for

inline void yield() {
  int const self = threadIdx.x;
  block->fibers[self].context.switch_to(block->scheduler);
  threadIdx.x = self;
}

inline void meet(Barrier& barrier, int threads) {
  uint64_t const phase = barrier.phase;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.phase;
    return;
  }
  while (barrier.phase == phase) yield();
}

inline void meet_warp() { meet(block->warps[threadIdx.x / kWarp], kWarp); }

// Every lane's words, once all have given theirs.
template <typename Use>
auto with_warp(std::array<uint32_t, 6> const& words, Use use) {
  auto& lanes = block->exchange[threadIdx.x / kWarp];
  lanes[threadIdx.x % kWarp] = words;
  meet_warp();
  auto const result = use(lanes);
  meet_warp();
  return result;
}

template <typename Params>
struct Call {
  void (*kernel)(Params);
  Params const* params;
};

template <typename Params>
void enter(unsigned high, unsigned low) {
  auto const* const call = reinterpret_cast<Call<Params> const*>(uint64_t{high} << 32 | low);
  call->kernel(*call->params);
  block->fibers[threadIdx.x].done = true;
  block->fibers[threadIdx.x].context.switch_to(block->scheduler);
}

// Returns false when threads wait for each other forever.
template <typename Params>
bool run_block(Call<Params> const& call, int threads) {
  Block state;
  state.fibers.resize(threads);
  state.warps.resize(threads / kWarp);
  state.exchange.resize(threads / kWarp);
  block = &state;
  threads_waited = 0;
  auto const address = reinterpret_cast<uint64_t>(&call);
  for (Fiber& fiber : state.fibers) {
    fiber.stack = std::make_unique_for_overwrite<char[]>(kStackBytes);
    fiber.context.prepare(fiber.stack.get(), kStackBytes, enter<Params>, static_cast<unsigned>(address >> 32), static_cast<unsigned>(address));
  }
  for (int rounds = 0, left = threads; left > 0; ++rounds) {
    if (rounds > 100'000'000) return false;
    left = 0;
    for (int thread = 0; thread < threads; ++thread) {
      if (state.fibers[thread].done) continue;
      threadIdx.x = thread;
      state.scheduler.switch_to(state.fibers[thread].context);
      if (stopped) return false;
      left += !state.fibers[thread].done;
    }
  }
  waited = waited && threads_waited == threads;
  return true;
}

}  // namespace emulator

inline void __syncthreads() { emulator::meet(emulator::block->all, static_cast<int>(emulator::block->fibers.size())); }
#include "operations.cuh"

namespace punica {

inline void wait_for_previous() { ++emulator::threads_waited; }
inline void start_next() {}

inline void demand(bool holds) {
  if (holds) return;
  emulator::stopped = true;
  emulator::yield();
}

template <typename Params>
cudaError_t launch(void (*kernel)(Params), int grid, int threads, Params const& params, LaunchConfig const&) {
  emulator::Call<Params> const call{kernel, &params};
  gridDim.x = grid;
  emulator::waited = true;
  emulator::stopped = false;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
    if (!emulator::run_block(call, threads)) return emulator::stopped ? cudaErrorLaunchFailure : cudaErrorLaunchTimeout;
  return emulator::waited ? cudaSuccess : cudaErrorUnknown;  // every thread waits exactly once
}

}  // namespace punica
