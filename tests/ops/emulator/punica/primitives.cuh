// Stands in for csrc/include/punica/primitives.cuh: runs kernels on a CPU, so that their logic is tested without a GPU. The
// threads of a block are fibers of one thread; blocks run one after another. No memory model.
#pragma once

#define __launch_bounds__(...)
#define __grid_constant__
#undef __shared__
#define __shared__ static

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

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
  ucontext_t context;
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
  ucontext_t scheduler;
  std::vector<Fiber> fibers;
  Barrier all;
  std::vector<Barrier> warps;
  std::vector<std::array<std::array<uint32_t, 6>, kWarp>> exchange;
};

inline Block* block = nullptr;
inline bool waited = true;  // whether every thread has waited for the kernel before; reset by launch
inline int threads_waited = 0;
inline int64_t prefetched = 0;  // sum of the bytes that were asked for

inline void yield() {
  int const self = threadIdx.x;
  swapcontext(&block->fibers[self].context, &block->scheduler);
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
  swapcontext(&block->fibers[threadIdx.x].context, &block->scheduler);
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
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    makecontext(&fiber.context, reinterpret_cast<void (*)()>(enter<Params>), 2, static_cast<unsigned>(address >> 32),
                static_cast<unsigned>(address));
  }
  for (int rounds = 0, left = threads; left > 0; ++rounds) {
    if (rounds > 100'000'000) return false;
    left = 0;
    for (int thread = 0; thread < threads; ++thread) {
      if (state.fibers[thread].done) continue;
      threadIdx.x = thread;
      swapcontext(&state.scheduler, &state.fibers[thread].context);
      left += !state.fibers[thread].done;
    }
  }
  waited = waited && threads_waited == threads;
  return true;
}

}  // namespace emulator

inline void __syncthreads() { emulator::meet(emulator::block->all, static_cast<int>(emulator::block->fibers.size())); }
inline void __syncwarp() { emulator::meet_warp(); }
inline float __uint_as_float(uint32_t word) { return std::bit_cast<float>(word); }
inline long long __ldcg(long long const* pointer) { return *pointer; }
inline int __ldcg(int const* pointer) { return *pointer; }

namespace punica {

enum class Source { kConstant, kActivation };

template <Source>
uint4 load16(void const* pointer) {
  uint4 out;
  std::memcpy(&out, pointer, sizeof(out));
  return out;
}

inline uint4 load16_now(void const* pointer) { return load16<Source::kConstant>(pointer); }

inline float4 load_floats_if(bool wanted, float const* pointer) {
  return wanted ? *reinterpret_cast<float4 const*>(pointer) : make_float4(0.f, 0.f, 0.f, 0.f);
}

template <Source>
uint16_t load2(void const* pointer) {
  uint16_t out;
  std::memcpy(&out, pointer, sizeof(out));
  return out;
}

template <typename T>
float element(uint32_t word, int half) {
  uint16_t const bits = static_cast<uint16_t>(word >> (16 * half));
  T value;
  std::memcpy(&value, &bits, sizeof(value));
  return static_cast<float>(value);
}

template <typename T>
void mma_16x8x16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  int const lane = threadIdx.x % emulator::kWarp;
  auto const sums = emulator::with_warp({a0, a1, a2, a3, b0, b1}, [&](auto const& lanes) {
    std::array<float, 4> out{d[0], d[1], d[2], d[3]};
    for (int i = 0; i < 4; ++i)
      for (int k = 0; k < 16; ++k) {
        auto const& a = lanes[lane / 4 * 4 + k % 8 / 2];
        auto const& b = lanes[(lane % 4 * 2 + i % 2) * 4 + k % 8 / 2];
        out[i] += element<T>(a[k / 8 * 2 + i / 2], k % 2) * element<T>(b[4 + k / 8], k % 2);
      }
    return out;
  });
  std::copy(sums.begin(), sums.end(), d);
}

inline void fence() {}
inline int count(int* counter) { return (*counter)++; }

inline unsigned warp_min(unsigned value) {
  return emulator::with_warp({value, 0, 0, 0, 0, 0}, [](auto const& lanes) {
    unsigned least = ~0u;
    for (auto const& words : lanes) least = std::min(least, words[0]);
    return least;
  });
}

inline float shuffle_xor(float value, int distance) {
  int const other = threadIdx.x % emulator::kWarp ^ distance;
  return emulator::with_warp({std::bit_cast<uint32_t>(value), 0, 0, 0, 0, 0},
                             [&](auto const& lanes) { return std::bit_cast<float>(lanes[other][0]); });
}

inline int shuffle(int value, int lane) {
  return emulator::with_warp({static_cast<uint32_t>(value), 0, 0, 0, 0, 0},
                             [&](auto const& lanes) { return static_cast<int>(lanes[lane][0]); });
}

inline uint32_t transposed_8x8(uint32_t pair) {
  int const row = threadIdx.x % emulator::kWarp / 4;
  int const column = threadIdx.x % 4 * 2;
  return emulator::with_warp({pair, 0, 0, 0, 0, 0}, [&](auto const& lanes) {
    auto const element = [&](int r, int c) { return lanes[r * 4 + c / 2][0] >> (c % 2 * 16) & 0xffffu; };
    return element(column, row) | element(column + 1, row) << 16;
  });
}

inline int quotient(int a, int b) { return a / b; }

inline float4 quad_sum(float4 value) {
  using std::bit_cast;
  std::array<uint32_t, 6> const words{bit_cast<uint32_t>(value.x), bit_cast<uint32_t>(value.y), bit_cast<uint32_t>(value.z),
                                      bit_cast<uint32_t>(value.w)};
  return emulator::with_warp(words, [](auto const& lanes) {
    auto const* const quad = &lanes[threadIdx.x % emulator::kWarp / 4 * 4];
    std::array<float, 4> sum;
    for (int i = 0; i < 4; ++i)
      sum[i] = (bit_cast<float>(quad[0][i]) + bit_cast<float>(quad[1][i])) + (bit_cast<float>(quad[2][i]) + bit_cast<float>(quad[3][i]));
    return make_float4(sum[0], sum[1], sum[2], sum[3]);
  });
}

inline void wait_for_previous() { ++emulator::threads_waited; }
inline void start_next() {}

inline void prefetch(void const* pointer, int bytes) {
  auto const* const bytes_asked = static_cast<unsigned char const*>(pointer);
  for (int i = 0; i < bytes; ++i) emulator::prefetched += bytes_asked[i];
}

inline int4 load_metadata(int4 const* pointer) { return *pointer; }

template <typename Params>
cudaError_t launch(void (*kernel)(Params), int grid, int threads, Params const& params, LaunchConfig const&) {
  emulator::Call<Params> const call{kernel, &params};
  gridDim.x = grid;
  emulator::waited = true;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
    if (!emulator::run_block(call, threads)) return cudaErrorLaunchTimeout;
  return emulator::waited ? cudaSuccess : cudaErrorUnknown;  // every thread waits exactly once
}

}  // namespace punica
