// Stands in for csrc/include/punica/cluster.cuh: runs the sampling kernels on a CPU, so that their logic is tested without a GPU.
// The threads of all blocks of a cluster are fibers of one thread. They run in an order that changes at random each time they
// have met, so that a missing barrier shows. Blocks have shared memory of their own, filled with garbage. No memory model.
#pragma once

#define __launch_bounds__(...)
#define __grid_constant__

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "../../emulator/fiber.h"
#include "punica/params.h"

using std::max;
using std::min;

struct EmulatedIndex {
  int x = 0;
};

namespace emulator {

constexpr int kThreads = 64;  // of a block: fewer than on a GPU, for speed
constexpr int kWarps = kThreads / 32;
constexpr int kStackBytes = 64 << 10;
constexpr int kSharedBytes = 48 << 10;

struct Barrier {
  int expected = 0;
  int arrived = 0;
  uint64_t phase = 0;
};

struct Block {
  alignas(16) char shared[kSharedBytes];
  std::vector<uint32_t> cache;
  Barrier all{kThreads};
  Barrier warps[kWarps];
  uint64_t words[kThreads];
};

struct Fiber {
  Context context;
  std::unique_ptr<char[]> stack = std::make_unique_for_overwrite<char[]>(kStackBytes);
  EmulatedIndex thread;
  EmulatedIndex block;
  int rank = 0;
  uint64_t cluster_phase = 0;
  bool done = false;
};

inline Context scheduler;
inline Fiber* self = nullptr;
inline std::vector<std::unique_ptr<Block>> blocks;
inline Barrier cluster;
inline void (*run_thread)() = nullptr;

inline Block& own_block() { return *blocks[self->rank]; }

inline uint64_t arrive(Barrier& barrier) {
  uint64_t const phase = barrier.phase;
  if (++barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    ++barrier.phase;
  }
  return phase;
}

inline void wait(Barrier& barrier, uint64_t phase) {
  while (barrier.phase == phase) {
    Fiber* const fiber = self;
    fiber->context.switch_to(scheduler);
  }
}

inline void meet(Barrier& barrier) { wait(barrier, arrive(barrier)); }
inline Barrier& own_warp() { return own_block().warps[self->thread.x / 32]; }

// use(words of the warp's lanes), once all lanes have given theirs.
template <typename Use>
auto with_warp(uint64_t word, Use use) {
  own_block().words[self->thread.x] = word;
  meet(own_warp());
  auto const result = use(own_block().words + self->thread.x / 32 * 32);
  meet(own_warp());
  return result;
}

inline void enter() {
  run_thread();
  self->done = true;
  self->context.switch_to(scheduler);
}

// Runs the blocks [first, first + num_blocks) as one cluster. False when threads wait for each other for ever.
inline bool run_cluster(int first, int num_blocks, int cache_words, std::mt19937& random) {
  blocks.clear();
  cluster = {num_blocks * kThreads};
  std::vector<Fiber> fibers(cluster.expected);
  std::vector<Fiber*> live;
  for (int rank = 0; rank < num_blocks; ++rank) {
    blocks.push_back(std::make_unique<Block>());
    std::memset(blocks[rank]->shared, 0xa5, kSharedBytes);
    blocks[rank]->cache.assign(cache_words, 0xa5a5a5a5u);
    for (Barrier& warp : blocks[rank]->warps) warp.expected = 32;
  }
  for (int i = 0; i < cluster.expected; ++i) {
    Fiber& fiber = fibers[i];
    fiber.thread.x = i % kThreads;
    fiber.rank = i / kThreads;
    fiber.block.x = first + fiber.rank;
    fiber.context.prepare(fiber.stack.get(), kStackBytes, enter);
    live.push_back(&fiber);
  }
  for (int rounds = 0; !live.empty(); ++rounds) {
    if (rounds > 100'000) return false;
    std::shuffle(live.begin(), live.end(), random);
    for (Fiber* fiber : live) {
      self = fiber;
      scheduler.switch_to(fiber->context);
    }
    std::erase_if(live, [](Fiber const* fiber) { return fiber->done; });
  }
  return true;
}

}  // namespace emulator

#define threadIdx (emulator::self->thread)
#define blockIdx (emulator::self->block)

inline void __syncthreads() { emulator::meet(emulator::own_block().all); }

inline int __syncthreads_and(int predicate) {
  auto& block = emulator::own_block();
  block.words[threadIdx.x] = predicate != 0;
  __syncthreads();
  int const all = std::count(block.words, block.words + emulator::kThreads, 1) == emulator::kThreads;
  __syncthreads();
  return all;
}

inline uint64_t __shfl_xor_sync(unsigned, uint64_t value, int offset) {
  int const lane = threadIdx.x % 32;
  return emulator::with_warp(value, [&](uint64_t const* words) { return words[lane ^ offset]; });
}

inline uint64_t __shfl_up_sync(unsigned, uint64_t value, int offset) {
  int const lane = threadIdx.x % 32;
  return emulator::with_warp(value, [&](uint64_t const* words) { return words[lane >= offset ? lane - offset : lane]; });
}

inline void __match_all_sync(unsigned, int value, int* same) {
  uint64_t const mine = static_cast<uint32_t>(value);
  *same = emulator::with_warp(mine, [&](uint64_t const* words) { return std::count(words, words + 32, mine) == 32; });
}

inline uint32_t __reduce_add_sync(unsigned, uint32_t value) {
  return emulator::with_warp(value, [](uint64_t const* words) {
    uint32_t sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += static_cast<uint32_t>(words[lane]);
    return sum;
  });
}

inline void atomicAdd(uint32_t* address, uint32_t value) { *address += value; }
inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline float __uint_as_float(uint32_t word) { return std::bit_cast<float>(word); }
inline float __fdiv_rn(float a, float b) { return a / b; }

namespace punica {

constexpr int kMaxClusterBlocks = 8;
constexpr int kSampleThreads = emulator::kThreads;

struct Cluster {
  int const rank = emulator::self->rank;
  int const size = static_cast<int>(emulator::blocks.size());

  void arrive() const { emulator::self->cluster_phase = emulator::arrive(emulator::cluster); }
  void wait() const { emulator::wait(emulator::cluster, emulator::self->cluster_phase); }

  template <typename V>
  V* in_block(V* local, int block) const {
    auto const offset = reinterpret_cast<char*>(local) - emulator::own_block().shared;
    if (offset < 0 || offset >= emulator::kSharedBytes || block < 0 || block >= size) std::abort();
    return reinterpret_cast<V*>(emulator::blocks[block]->shared + offset);
  }
};

template <typename V>
V& block_shared() {
  static_assert(sizeof(V) <= emulator::kSharedBytes);
  return *reinterpret_cast<V*>(emulator::own_block().shared);
}

inline uint32_t* block_cache() { return emulator::own_block().cache.data(); }

}  // namespace punica
