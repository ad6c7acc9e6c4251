// v = x A^T inside the kernel of linear.cuh: some warps of each block take items of the work list of shrink.cuh from a queue, while the others stream
// weights. No block waits for one that has not begun: whoever runs takes what is left, and what has been taken is being worked on.
#pragma once

#include "punica/cluster.cuh"
#include "punica/hopper.cuh"
#include "punica/linear_params.h"
#include "punica/shrink.cuh"

namespace punica {

#ifdef PUNICA_HOPPER

constexpr int kShrinkBarrier = 3;
constexpr int kMostPolls = 1 << 24;  // seconds: nothing that is being worked on takes so long

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

// Works until the queue is empty.
template <typename T, typename Team>
__device__ inline void shrink_from_queue(ShrinkParams const& params, ShrinkShared<Team>& shared) {
  LinearCounters const counters(params.scratch);
  Tables const& tables = params.tables;
  wait_for_previous();  // the kernel in front may use the counters too
  if (Team::thread() == 0) shared.tickets[0] = count(counters.next);
  WorkList const work = load_work_list(tables, params.scratch);
  int const splits = split_count(params.scratch, work.num_units, tables.slices, params.in_features);
  int const total = work.num_units * tables.slices * splits;
#pragma unroll 1
  for (int turn = 0;; turn ^= 1) {
    Team::sync();
    int const index = shared.tickets[turn];
    if (index >= total) {
      // As many tickets are beyond the end as there are blocks.
      if (Team::thread() == 0 && index == total + static_cast<int>(gridDim.x) - 1) *counters.next = 0;
      return;
    }
    if (Team::thread() == 0) shared.tickets[turn ^ 1] = count(counters.next);
    ShrinkItem item;
    int4 const unit = load_unit(params, work, splits, index, item);
    TableRecord const record = load_record(tables, item.slice, unit.z);
    bool complete = item.split == 0;
    if (item.rank_start < record.lora_rank) {
      prefetch_a<T>(params, item, record, unit.w >> 16, Team::thread());
      if (unit.w >> 16 == kShrinkChunkShort) {
        complete = shrink_item<T, ShortTile<Team>, true>(params, item, record, shared.buffer, false);
      } else {
        complete = shrink_item<T, MiddleTile<Team>, true>(params, item, record, shared.buffer, false);
      }
    }
    if (complete && Team::thread() == 0) {
      fence();
      count(counters.done);
    }
  }
}

// Until all low-rank rows of the step are there, for the copy engine too. False if they are not: two kernels use the plan at the same time. By a whole
// warp of each block, once.
__device__ inline bool await_hidden(ShrinkParams const& params) {
  wait_for_previous();
  bool there = true;
  if (threadIdx.x % 32 == 0) {
    LinearCounters const counters(params.scratch);
    int const total = load_metadata(reinterpret_cast<int4 const*>(params.tables.plan + kNumShrinkUnits)).x * params.tables.slices;
    int done = load_acquire(counters.done);
#pragma unroll 1
    for (int polls = 1; done < total && polls < kMostPolls; ++polls) {
      pause();
      done = load_acquire(counters.done);
    }
    there = done == total;
    if (count(counters.passed) == static_cast<int>(gridDim.x) - 1) {
      *counters.done = 0;
      *counters.passed = 0;
    }
    fence_copies_from_memory();
  }
  __syncwarp();
  return there;
}

#endif

}  // namespace punica
