// Stands in for csrc/include/punica/primitives.cuh: runs the kernels of linear.cuh and prompt_shrink.cuh on a CPU. The threads of all blocks of a grid are fibers of one thread, which
// go on in an order that changes at random each time they have all been asked, and some warps stand still for a while. Blocks have shared memory of their own, filled with
// NaN; what the copy engine is asked for comes at any time until somebody waits for it in vain. The kernel in front ends at some time, too. Every address of shared
// memory is checked. No memory model.
#pragma once

#define __launch_bounds__(...)
#define __grid_constant__
#undef __shared__
#define __shared__ static
#define PUNICA_HOPPER 1

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "../../emulator/fiber.h"
#include "punica/params.h"

using std::max;
using std::min;

struct EmulatedIndex {
  int x = 0;
};
inline EmulatedIndex gridDim;

namespace emulator {

constexpr int kWarp = 32;
constexpr int kStackBytes = 64 << 10;
constexpr int kStaticBytes = (40 << 10) + 16;  // of shared memory: what is declared comes first, and not on 1024 bytes
constexpr uint32_t kBlockShift = 20;           // an address in the cluster has the block, plus one, above

struct Barrier {
  int arrived = 0;
  uint64_t phase = 0;
};

struct CopyBarrier {
  int expected = 0;
  int arrived = 0;
  int64_t bytes = 0;  // promised and not there
  uint64_t phase = 0;
};

struct Copy {
  int block;
  uint32_t barrier;
  int bytes;
  std::function<void()> move;
};

struct Product {
  std::function<void()> run;
};

struct Block {
  int live = 0;  // threads
  std::vector<char> shared;
  Barrier all;
  std::map<int, Barrier> named;
  std::map<uint32_t, CopyBarrier> copies;
  std::vector<Barrier> warps;
  std::vector<std::array<std::array<uint32_t, 6>, kWarp>> exchange;
};

struct Fiber {
  Context context;
  std::unique_ptr<char[]> stack = std::make_unique_for_overwrite<char[]>(kStackBytes);
  EmulatedIndex thread;
  EmulatedIndex block;
  uint64_t cluster_phase = 0;
  std::vector<std::vector<Product>> products{1};  // groups, the last of them open
  std::function<bool()> ready;                    // empty: it can go on
  bool polls = false;  // it asks again and again for what others do
  bool done = false;
};

struct Grid {
  Context scheduler;
  std::vector<Block> blocks;
  std::vector<Barrier> clusters;
  std::vector<Copy> copies;
  int threads;
  int cluster_blocks;
  bool in_front_ended = false;
};

inline Grid* grid = nullptr;
inline Fiber* self = nullptr;
inline int64_t prefetched = 0;
inline char message[256];

[[noreturn]] inline void fail(char const* what) {
  std::snprintf(message, sizeof(message), "block %d thread %d: %s", self == nullptr ? -1 : self->block.x, self == nullptr ? -1 : self->thread.x, what);
  throw std::runtime_error(message);
}

inline Block& own_block() { return grid->blocks[self->block.x]; }

// Back to the scheduler, until `ready` holds.
inline void yield(std::function<bool()> ready) {
  Fiber* const fiber = self;
  fiber->ready = std::move(ready);
  fiber->context.switch_to(grid->scheduler);
}

inline uint64_t arrive(Barrier& barrier, int threads) {
  uint64_t const phase = barrier.phase;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.phase;
  }
  return phase;
}

inline void wait(Barrier const& barrier, uint64_t phase) {
  if (barrier.phase == phase) yield([&barrier, phase] { return barrier.phase != phase; });
}

inline void meet(Barrier& barrier, int threads) { wait(barrier, arrive(barrier, threads)); }
inline void meet_warp() { meet(own_block().warps[self->thread.x / kWarp], kWarp); }

// Every lane's words, once all have given theirs.
template <typename Use>
auto with_warp(std::array<uint32_t, 6> const& words, Use use) {
  auto& lanes = own_block().exchange[self->thread.x / kWarp];
  lanes[self->thread.x % kWarp] = words;
  meet_warp();
  auto const result = use(lanes);
  meet_warp();
  return result;
}

// Whose shared memory an address, of this block or of the cluster, is in.
inline int block_of(uint32_t address) {
  int const own = self->block.x;
  uint32_t const other = address >> kBlockShift;
  return other == 0 ? own : own / grid->cluster_blocks * grid->cluster_blocks + static_cast<int>(other) - 1;
}

// Where it is.
inline char* at(uint32_t address, int bytes) {
  int const block = block_of(address);
  uint32_t const offset = address & ((1u << kBlockShift) - 1);
  auto& shared = grid->blocks[block].shared;
  if (offset + bytes > shared.size() || offset % std::min(bytes, 16) != 0) fail("an address of shared memory is not the block's, or not aligned");
  return shared.data() + offset;
}

inline void advance(CopyBarrier& barrier) {
  if (barrier.arrived != barrier.expected || barrier.bytes != 0) return;
  barrier.arrived = 0;
  ++barrier.phase;
}

inline void finish(size_t index) {
  std::swap(grid->copies[index], grid->copies.back());  // any order will do, and there can be thousands
  Copy const copy = std::move(grid->copies.back());
  grid->copies.pop_back();
  copy.move();
  CopyBarrier& barrier = grid->blocks[copy.block].copies[copy.barrier];
  barrier.bytes -= copy.bytes;
  advance(barrier);
}

inline std::function<void()> thread_body;
inline std::function<void()> end_in_front;  // what the kernel in front does last
inline std::string failure;
inline bool starts_next_late = false;  // the kernel may be in front of one that relies on all before it having ended

inline void enter() {
  try {
    thread_body();
  } catch (std::exception const& error) {
    failure = error.what();
  }
  self->done = true;
  --own_block().live;
  self->context.switch_to(grid->scheduler);
}

// False if a thread failed, or when threads wait for each other for ever: `failure` says which.
inline bool run_grid(int num_blocks, int threads, int cluster_blocks, int shared_bytes, unsigned seed) {
  std::mt19937 random(seed);
  Grid state;
  grid = &state;
  self = nullptr;
  failure.clear();
  state.threads = threads;
  state.cluster_blocks = cluster_blocks;
  state.clusters.resize(num_blocks / cluster_blocks);
  state.blocks.resize(num_blocks);
  for (Block& block : state.blocks) {
    block.live = threads;
    block.shared.assign(kStaticBytes + shared_bytes, static_cast<char>(0xff));
    block.warps.resize(threads / kWarp);
    block.exchange.resize(threads / kWarp);
  }
  std::vector<Fiber> fibers(static_cast<size_t>(num_blocks) * threads);
  std::vector<Fiber*> live;
  for (size_t i = 0; i < fibers.size(); ++i) {
    Fiber& fiber = fibers[i];
    fiber.thread.x = static_cast<int>(i % threads);
    fiber.block.x = static_cast<int>(i / threads);
    fiber.context.prepare(fiber.stack.get(), kStackBytes, enter);
    live.push_back(&fiber);
  }
  constexpr int kMostPolls = 1000;  // of all threads that are left
  constexpr int kStall = 32;        // rounds that a third of all warps stands still
  int const last_in_front = static_cast<int>(random() % 64);  // round
  std::vector<char> stands(static_cast<size_t>(num_blocks) * threads / kWarp);
  for (int polls = 0, round = 0; !live.empty() && failure.empty(); ++round) {
    if (round % kStall == 0)
      for (char& still : stands) still = random() % 3 == 0;
    std::shuffle(live.begin(), live.end(), random);
    bool moved = false;
    for (Fiber* fiber : live) {
      if (fiber->ready && !fiber->ready()) continue;
      moved = moved || !fiber->polls;
      if (stands[(fiber->block.x * threads + fiber->thread.x) / kWarp]) continue;
      fiber->ready = nullptr;
      fiber->polls = false;
      self = fiber;
      state.scheduler.switch_to(fiber->context);
      if (!failure.empty()) break;
    }
    self = nullptr;
    std::erase_if(live, [](Fiber const* fiber) { return fiber->done; });
    if (!moved || random() % 4 == 0)
      for (size_t left = state.copies.empty() ? 0 : 1 + random() % state.copies.size(); left > 0; --left, moved = true)
        finish(random() % state.copies.size());
    if (round == last_in_front) {
      end_in_front();
      state.in_front_ended = true;
    }
    polls = moved || !state.in_front_ended ? 0 : polls + 1;
    if (polls > kMostPolls && !live.empty()) failure = "threads wait for each other for ever";
  }
  if (failure.empty() && !state.copies.empty()) failure = "the kernel ends and a copy is on its way";
  return failure.empty();
}

}  // namespace emulator

#define threadIdx (emulator::self->thread)
#define blockIdx (emulator::self->block)

inline void __syncthreads() { emulator::meet(emulator::own_block().all, emulator::grid->threads); }

#include "../../emulator/punica/operations.cuh"

inline int __ldg(int const* pointer) { return *pointer; }
inline int __popc(unsigned word) { return std::popcount(word); }
inline int __ffs(int word) { return word == 0 ? 0 : std::countr_zero(static_cast<unsigned>(word)) + 1; }
inline int __clz(int word) { return std::countl_zero(static_cast<unsigned>(word)); }

inline unsigned __ballot_sync(unsigned, bool mine) {
  return emulator::with_warp({mine, 0, 0, 0, 0, 0}, [](auto const& lanes) {
    unsigned all = 0;
    for (int lane = 0; lane < emulator::kWarp; ++lane) all |= lanes[lane][0] << lane;
    return all;
  });
}
inline bool __any_sync(unsigned mask, bool mine) { return __ballot_sync(mask, mine) != 0; }

template <typename V>
V __shfl_sync(unsigned, V value, int lane) {
  std::array<uint32_t, 6> words{};
  static_assert(sizeof(V) <= 8);
  std::memcpy(words.data(), &value, sizeof(V));
  return emulator::with_warp(words, [&](auto const& lanes) {
    V out;
    std::memcpy(&out, lanes[lane & 31].data(), sizeof(V));
    return out;
  });
}
inline int __shfl_up_sync(unsigned, int value, int distance) {
  int const lane = threadIdx.x % 32;
  return __shfl_sync(~0u, value, lane >= distance ? lane - distance : lane);
}

namespace punica {

inline void wait_for_previous() {
  if (!emulator::grid->in_front_ended) emulator::yield([] { return emulator::grid->in_front_ended; });
}
inline void start_next() {
  if (emulator::starts_next_late && !emulator::grid->in_front_ended) emulator::fail("the next kernel may start before the one in front has ended");
}
inline void demand(bool holds) {
  if (!holds) emulator::fail("the kernel stops");
}

template <typename Params>
cudaError_t launch(void (*)(Params), int, int, Params const&, LaunchConfig const&) {
  return cudaErrorNotSupported;
}

}  // namespace punica
