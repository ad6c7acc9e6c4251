// v = x A^T inside the kernel of linear.cuh: some warps of each block work on items of the work list of shrink.cuh, while the others stream weights. Blocks wait
// for low-rank rows that others compute, so all of them must get to run: there is at most one a multiprocessor, and no later kernel begins before they have.
#pragma once

#include "punica/cluster.cuh"
#include "punica/hopper.cuh"
#include "punica/linear_params.h"
#include "punica/shrink.cuh"

namespace punica {

#ifdef PUNICA_HOPPER

constexpr int kShrinkBarrier = 3;
constexpr int kMostPolls = 1 << 24;  // seconds: nothing that is being worked on takes so long
constexpr int kGaveUp = 1 << 20;     // more than there are units

template <typename Team>
struct LinearShared;

// The last warps of a block of kBlockThreads.
template <int kWarps_, int kBlockThreads>
struct TeamOfBlock {
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = 32 * kWarps;
  static __device__ int thread() { return static_cast<int>(threadIdx.x) - (kBlockThreads - kThreads); }
  static __device__ void sync() { named_barrier(kShrinkBarrier, kThreads); }
  static __device__ bool& last() { return block_shared<LinearShared<TeamOfBlock>>().shrink.last; }
};

// What a team has in shared memory.
template <typename Team>
struct ShrinkShared {
  static constexpr int kFloats = MiddleTile<Team>::kFloats;
  static_assert(kFloats >= ShortTile<Team>::kFloats);

  alignas(16) float buffer[kFloats];
  int tickets[2];
  bool last;
};

// Words behind the counters of units, all zero between kernels.
struct LinearCounters {
  int* next;    // item of the queue
  int* done;    // units of a slice
  int* passed;  // blocks that have seen that all are done

  __device__ explicit LinearCounters(Scratch const& scratch)
      : next(scratch.counters + kNumUnitCounters), done(next + 1), passed(next + 2) {}
};

// Asks for an item's part of A, so that all of it is on its way together. By a team whose threads are rows of A.
template <typename T>
__device__ inline void prefetch_a(ShrinkParams const& params, ShrinkItem const& item, TableRecord const& record, int ranks, int thread) {
  int const rank = item.rank_start + thread;
  int const first = item.first_step * kStepColumns;
  int const columns = min(item.end_step * kStepColumns, params.in_features) - first;
  if (thread >= ranks || rank >= record.lora_rank || columns <= 0) return;
  prefetch(static_cast<T const*>(params.tables.arena) + record.a_offset + static_cast<int64_t>(rank) * params.in_features + first, columns * 2);
}

// Works until no item is left. A block's first is its own: all but x is known and on its way when the kernel in front ends. Others come from a queue.
template <typename T, typename Team>
__device__ inline void shrink_items(ShrinkParams const& params, ShrinkShared<Team>& shared) {
  LinearCounters const counters(params.scratch);
  Tables const& tables = params.tables;
  WorkList const work = load_work_list(tables, params.scratch);
  int const splits = split_count(params.scratch, work.num_units, tables.slices, params.in_features);
  int const total = work.num_units * tables.slices * splits;
  auto const draw = [&] {
    int const drawn = count(counters.next);
    if (drawn == total - 1) *counters.next = 0;  // one is drawn for each item
    return static_cast<int>(gridDim.x) + drawn;
  };
  int index = blockIdx.x;
#pragma unroll 1
  for (int turn = 0; index < total; turn ^= 1) {
    bool const first = index == static_cast<int>(blockIdx.x);
    if (!first && Team::thread() == 0) shared.tickets[turn] = draw();
    ShrinkItem item;
    int4 const unit = load_unit(params, work, splits, index, item);
    TableRecord const record = load_record(tables, item.slice, unit.z);
    bool complete = item.split == 0;
    if (item.rank_start < record.lora_rank) {
      prefetch_a<T>(params, item, record, unit.w >> 16, Team::thread());
      if (unit.w >> 16 == kShrinkChunkShort) {
        complete = shrink_item<T, ShortTile<Team>, true>(params, item, record, shared.buffer, first);
      } else {
        complete = shrink_item<T, MiddleTile<Team>, true>(params, item, record, shared.buffer, first);
      }
    } else if (first) {
      wait_for_previous();
    }
    if (Team::thread() == 0) {
      if (complete) count_in_order(counters.done);
      if (first) shared.tickets[turn] = draw();
    }
    Team::sync();
    index = shared.tickets[turn];
  }
}

__device__ inline int count_of_units(ShrinkParams const& params) {
  return load_metadata(reinterpret_cast<int4 const*>(params.tables.plan + kNumShrinkUnits)).x * params.tables.slices;
}

// Until all low-rank rows of the step are there, for the copy engine too, or have been awaited for too long. By a whole warp of each block, once.
__device__ inline void await_hidden(ShrinkParams const& params) {
  wait_for_previous();
  if (threadIdx.x % 32 == 0) {
    LinearCounters const counters(params.scratch);
    int const total = count_of_units(params);
    int polls = 0;
#pragma unroll 1
    for (; load_acquire(counters.done) < total && polls < kMostPolls; ++polls) pause();
    if (polls == kMostPolls) add(counters.done, kGaveUp);  // what comes now is too late: leave_hidden stops
    fence_copies_from_memory();
  }
  __syncwarp();
}

// By the same warps, when nothing waits for them any more. Traps unless each unit has been counted once and none was given up, as when two kernels
// use the plan at the same time.
__device__ inline void leave_hidden(ShrinkParams const& params) {
  if (threadIdx.x % 32 != 0) return;
  LinearCounters const counters(params.scratch);
  int const done = load_acquire(counters.done);
  demand(done == count_of_units(params));
  if (count(counters.passed) == static_cast<int>(gridDim.x) - 1) {
    *counters.done = 0;
    *counters.passed = 0;
  }
}

#endif

}  // namespace punica
