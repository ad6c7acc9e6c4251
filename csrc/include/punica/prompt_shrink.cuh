// v = x A^T for steps of many rows, on sm_90a: all slices of a tile of 64 rows from one read of x.
//
// A cluster takes a tile, and each of its blocks every eighth step of 64 columns of x. One warp brings x by the copy engine and two bring A, each into slots
// of a ring in shared memory and as far ahead as there is room, into the next tile too; a warpgroup multiplies. The low ranks of all slices lie
// behind one another in groups of sixteen, and a product has 64 of them. Then each block gets from all others, by stores into its shared memory,
// their sums of an eighth of the rows, adds them in the order of the blocks and writes the low-rank rows: no parts in memory, no counters.
#pragma once

#include "punica/cluster.cuh"
#include "punica/hopper.cuh"
#include "punica/prompt_walk.cuh"
#include "punica/shrink.cuh"
#include "punica/wgmma.cuh"

namespace punica {

constexpr int kPromptBlocksPerSm = 2;  // with one, fewer clusters than tiles of 1,024 rows find eight multiprocessors together
constexpr int kProductRanks = 64;
constexpr int kProductGroups = kProductRanks / kGroupRanks;
constexpr int kMostProducts = 3;  // a step: more have no registers
constexpr int kPassGroups = kMostProducts * kProductGroups;

constexpr int kSlotBytes = kMaxTileRows * 2 * kPromptColumns;
static_assert(kProductRanks == kMaxTileRows);
constexpr int kXSlots = 4;
constexpr int kASlots = 5;
constexpr int kMailGroupBytes = 32 * 16;  // four ranks of a row from each lane of a warp
constexpr int kMailBytes = kPromptClusterBlocks * kProductGroups * kMailGroupBytes;
constexpr int kMailboxes = 2;
constexpr int kPromptSharedBytes = 1024 + (kXSlots + kASlots) * kSlotBytes + kMailboxes * kMailBytes;

constexpr int kMultipliers = 128;
constexpr int kXThreads = 32;
constexpr int kAThreads = 64;
constexpr int kPromptThreads = kMultipliers + kXThreads + kAThreads;
constexpr int kSourcesBarrier = 1;
constexpr int kMailBarrier = 2;

#ifdef PUNICA_HOPPER

// What a block has in shared memory beside slots and mail.
struct PromptShared {
  uint64_t x_full[kXSlots];  // barriers
  uint64_t x_empty[kXSlots];
  uint64_t a_full[kASlots];
  uint64_t a_empty[kASlots];
  uint64_t mail[kMailboxes];
  void const* sources[kPassGroups * kGroupRanks];  // the row of A for each row of the slots of a step; nullptr: none
};

// A thread's way around the slots of x or of A. Addresses are of shared memory.
template <int kSlots>
class SlotRing {
 public:
  __device__ SlotRing(uint64_t (&full)[kSlots], uint64_t (&empty)[kSlots], uint32_t memory)
      : full_(kept(shared_address(full))), empty_(kept(shared_address(empty))), memory_(memory) {}

  __device__ uint32_t await_full() const {
    await(full(), round_ & 1);
    return memory_ + index_ * kSlotBytes;
  }
  __device__ uint32_t await_empty() const {
    await(empty_ + index_ * 8, ~round_ & 1);
    return memory_ + index_ * kSlotBytes;
  }
  __device__ uint32_t full() const { return full_ + index_ * 8; }
  __device__ void advance() {
    if (++index_ == kSlots) {
      index_ = 0;
      ++round_;
    }
  }
  // The warp has read the oldest slot that it has not given back.
  __device__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(empty_ + oldest_ * 8);
    if (++oldest_ == kSlots) oldest_ = 0;
  }

 private:
  uint32_t full_;
  uint32_t empty_;
  uint32_t memory_;
  int index_ = 0;
  int round_ = 0;
  int oldest_ = 0;
};

// By one thread.
__device__ inline void bring_x(PromptParams const& params, PromptSteps const& steps, SlotRing<kXSlots> ring) {
  PromptWalk walk(params.shrink.tables);
  wait_for_previous();
#pragma unroll 1
  for (; !walk.done(); walk.look_ahead(), walk.advance()) {
    int4 const rows = walk.tile().rows;
    int const boxes = (rows.y + kPromptBoxRows - 1) / kPromptBoxRows;
    int const num_groups = walk.tile().num_groups();
#pragma unroll 1
    for (int group = 0; group < num_groups; group += kPassGroups)
#pragma unroll 1
      for (int step = 0; step < steps.count; ++step) {
        constexpr int kBoxBytes = kPromptBoxRows * 2 * kPromptColumns;
        uint32_t const to = ring.await_empty();
        arrive_for(ring.full(), boxes * kBoxBytes);
        for (int box = 0; box < boxes; ++box)
          copy_box(to + box * kBoxBytes, params.x, steps.column(step), rows.x + box * kPromptBoxRows, ring.full(), Keep::kNormal);
        ring.advance();
      }
  }
}

// Where in A the rows of a step's slots come from. A lane of the product ends with ranks 4 q ... 4 q + 3 of a group in this order.
template <typename T>
__device__ inline void find_sources(ShrinkParams const& params, PromptTile const& tile, int first_group, int num_groups, PromptShared& shared, int thread) {
  named_barrier(kSourcesBarrier, kAThreads);  // those of the pass before have been read
  for (int row = thread; row < num_groups * kGroupRanks; row += kAThreads) {
    RankGroup const group = tile.group(first_group + row / kGroupRanks);
    int const member = row % kGroupRanks;
    int const rank = group.rank_start + member % 8 / 2 * 4 + member / 8 * 2 + member % 2;
    T const* const a = static_cast<T const*>(params.tables.arena) + group.a_offset;
    shared.sources[row] = rank < group.lora_rank ? a + static_cast<int64_t>(rank) * params.in_features : nullptr;
  }
  named_barrier(kSourcesBarrier, kAThreads);
}

// Rows of A, whose sixteenths are swapped as the tensor core wants them.
template <typename T>
__device__ inline void bring_a(ShrinkParams const& params, PromptSteps const& steps, SlotRing<kASlots> ring, PromptShared& shared, int thread) {
  int const chunk = thread % 8;
  int const first_row = thread / 8;
  uint32_t const offset = first_row * 2 * kPromptColumns + ((chunk ^ first_row) << 4);
  PromptWalk walk(params.tables);
#pragma unroll 1
  for (; !walk.done(); walk.look_ahead(), walk.advance()) {
    int const all_groups = walk.tile().num_groups();
#pragma unroll 1
    for (int group = 0; group < all_groups; group += kPassGroups) {
      int const num_groups = min(kPassGroups, all_groups - group);
      find_sources<T>(params, walk.tile(), group, num_groups, shared, thread);
#pragma unroll 1
      for (int step = 0; step < steps.count; ++step) {
        int const column = steps.column(step) + chunk * 8;
        bool const inside = column < params.in_features;
#pragma unroll 1
        for (int first = 0; first < num_groups * kGroupRanks; first += kProductRanks) {
          uint32_t const to = ring.await_empty() + offset;
          int const rows = min(kProductRanks, num_groups * kGroupRanks - first);
#pragma unroll 2
          for (int row = first_row; row < rows; row += 8) {
            auto const* const source = static_cast<T const*>(shared.sources[first + row]);
            if (source != nullptr) copy16(to + (row - first_row) * 2 * kPromptColumns, inside ? source + column : source, inside);
          }
          arrive_when_copied(ring.full());
          ring.advance();
        }
      }
    }
  }
}

// Sums of the block's steps, 64 ranks in each of d.
template <typename T, int kProducts>
__device__ inline void multiply_prompt(int num_steps, SlotRing<kXSlots>& x_ring, SlotRing<kASlots>& a_ring, float (&d)[kProducts][kProductRanks / 2]) {
#pragma unroll 1
  for (int step = 0; step < num_steps; ++step) {
    uint64_t const x = operand_at(x_ring.await_full());
    x_ring.advance();
    uint64_t a[kProducts];
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      a[i] = operand_at(a_ring.await_full());
      a_ring.advance();
    }
    fence_products_from_shared();
    begin_products();
#pragma unroll
    for (int k = 0; k < kPromptColumns / 16; ++k)
#pragma unroll
      for (int i = 0; i < kProducts; ++i) multiply_warpgroup<T>(d[i], x + 2 * k, a[i] + 2 * k);
    commit_products();
    await_products<0>();
    x_ring.release();
#pragma unroll
    for (int i = 0; i < kProducts; ++i) a_ring.release();
  }
}

// The mail of a block: sums that the blocks of the cluster send it. There are two boxes. Who sends has got the mail before from every block, and a block
// sends when all its warps have read the one before that, which was in the same box.
class Mail {
 public:
  __device__ Mail(PromptShared& shared, uint32_t memory, int block)
      : barriers_(kept(shared_address(shared.mail))), memory_(memory), block_(block) {}

  // Rows go to the blocks that sum them, eight to each.
  __device__ void send(float const (&d)[kProductRanks / 2], int num_groups) const {
    named_barrier(kMailBarrier, kMultipliers);
    int const warp = threadIdx.x / 32;
    uint32_t const to = box() + block_ * kProductGroups * kMailGroupBytes + threadIdx.x % 32 * 16;
    if (threadIdx.x == 0) arrive_for(barrier(), kPromptClusterBlocks * num_groups * kMailGroupBytes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t const there = address_in_block(to, 2 * warp + half);
      uint32_t const barrier_there = address_in_block(barrier(), 2 * warp + half);
#pragma unroll
      for (int group = 0; group < kProductGroups; ++group) {
        float const* const own = d + 8 * group + 2 * half;
        if (group < num_groups) send16(there + group * kMailGroupBytes, make_float4(own[0], own[1], own[4], own[5]), barrier_there);
      }
    }
  }

  // Four ranks of a row, summed over the blocks. By a warp for each group.
  __device__ float4 receive(int group) const {
    await(barrier(), count_ / kMailboxes & 1);
    uint32_t const from = box() + group * kMailGroupBytes + threadIdx.x % 32 * 16;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int block = 0; block < kPromptClusterBlocks; ++block) {
      uint4 const words = load_shared16(from + block * kProductGroups * kMailGroupBytes);
      sum = added(sum, make_float4(__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z), __uint_as_float(words.w)));
    }
    return sum;
  }
  __device__ void advance() { ++count_; }

 private:
  __device__ uint32_t barrier() const { return barriers_ + count_ % kMailboxes * 8; }
  __device__ uint32_t box() const { return memory_ + count_ % kMailboxes * kMailBytes; }

  uint32_t barriers_;
  uint32_t memory_;
  int block_;
  int count_ = 0;
};

// The low-rank rows of a pass. `walk` has seen the next tile then.
template <typename T, int kProducts>
__device__ inline void shrink_pass(ShrinkParams const& params, int num_steps, SlotRing<kXSlots>& x_ring, SlotRing<kASlots>& a_ring, Mail& mail,
                                   PromptWalk& walk, int first_group, int rank_pitch, int block) {
  constexpr int kRows = kMaxTileRows / kPromptClusterBlocks;
  float d[kProducts][kProductRanks / 2] = {};
  multiply_prompt<T, kProducts>(num_steps, x_ring, a_ring, d);
  PromptTile const tile = walk.tile();
  int const warp = threadIdx.x / 32;
  int const t = block * kRows + static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    int const first = first_group + i * kProductGroups;
    mail.send(d[i], min(kProductGroups, tile.num_groups() - first));
    if (i == kProducts - 1) walk.look_ahead();
    float4 const sum = mail.receive(warp);
    mail.advance();
    RankGroup const group = tile.group(first + warp);
    int const rank = group.rank_start + static_cast<int>(threadIdx.x) % 4 * 4;
    if (t >= tile.rows.y || rank >= round_up(group.lora_rank, kRowAlignment)) continue;
    ShrinkItem const item{.row_start = tile.rows.x, .rank_start = rank, .rank_pitch = rank_pitch, .slice = group.slice};
    store_hidden<T>(params, hidden_offset(params, item, t), sum, group.lora_rank - rank);
  }
}

template <typename T>
__device__ inline void shrink_tiles(ShrinkParams const& params, Cluster const& cluster, PromptSteps const& steps, SlotRing<kXSlots> x_ring,
                                    SlotRing<kASlots> a_ring, Mail mail, int block) {
  PromptWalk walk(params.tables);
  int const rank_pitch = load_work_list(params.tables.plan).rank_pitch;
  cluster.wait();
  wait_for_previous();
#pragma unroll 1
  for (; !walk.done(); walk.advance()) {
    int const num_groups = walk.tile().num_groups();
    if (num_groups == 0) walk.look_ahead();
#pragma unroll 1
    for (int group = 0; group < num_groups; group += kPassGroups) {
      int const left = num_groups - group;
      if (left <= kProductGroups) {
        shrink_pass<T, 1>(params, steps.count, x_ring, a_ring, mail, walk, group, rank_pitch, block);
      } else if (left <= 2 * kProductGroups) {
        shrink_pass<T, 2>(params, steps.count, x_ring, a_ring, mail, walk, group, rank_pitch, block);
      } else {
        shrink_pass<T, 3>(params, steps.count, x_ring, a_ring, mail, walk, group, rank_pitch, block);
      }
    }
  }
}

template <typename T>
__device__ inline void prompt_block(PromptParams const& params) {
  auto& shared = block_shared<PromptShared>();
  Cluster const cluster;
  int const block = blockIdx.x % kPromptClusterBlocks;
  int const thread = static_cast<int>(threadIdx.x) - kMultipliers;  // negative: it multiplies
  uint32_t const memory = kept(round_up(shared_address(block_cache()), 1024));
  start_next();
  if (thread == 0) {
    for (int i = 0; i < kXSlots; ++i) {
      init_barrier(shared_address(&shared.x_full[i]), 1);
      init_barrier(shared_address(&shared.x_empty[i]), kMultipliers / 32);
    }
    for (int i = 0; i < kASlots; ++i) {
      init_barrier(shared_address(&shared.a_full[i]), kAThreads);
      init_barrier(shared_address(&shared.a_empty[i]), kMultipliers / 32);
    }
    for (int i = 0; i < kMailboxes; ++i) init_barrier(shared_address(&shared.mail[i]), 1);
    fetch_map(params.x);
    fence_barriers();
  }
  __syncthreads();
  cluster.arrive_begun();  // nobody sends to a block that has not begun
  PromptSteps const steps(params.shrink.in_features, block);
  SlotRing<kXSlots> const x_ring(shared.x_full, shared.x_empty, memory);
  SlotRing<kASlots> const a_ring(shared.a_full, shared.a_empty, memory + kXSlots * kSlotBytes);
  if (thread >= kXThreads) {
    bring_a<T>(params.shrink, steps, a_ring, shared, thread - kXThreads);
    cluster.wait();
  } else if (thread >= 0) {
    if (thread == 0) bring_x(params, steps, x_ring);
    __syncwarp();
    cluster.wait();
  } else {
    shrink_tiles<T>(params.shrink, cluster, steps, x_ring, a_ring, Mail(shared, memory + (kXSlots + kASlots) * kSlotBytes, block), block);
  }
}

#endif

template <typename T>
__global__ void __launch_bounds__(kPromptThreads, kPromptBlocksPerSm) prompt_kernel(const __grid_constant__ PromptParams params) {
#ifdef PUNICA_HOPPER
  prompt_block<T>(params);
#else
  __trap();  // compiled for 90 instead of 90a: there would be no result
#endif
}

template <typename T>
cudaError_t launch_prompt(PromptParams const& params, LaunchConfig const& config) {
  auto* const kernel = prompt_kernel<T>;
  cudaError_t const allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kPromptSharedBytes);
  if (allowed != cudaSuccess) return allowed;
  int const grid = params.shrink.scratch.num_blocks / kPromptClusterBlocks * kPromptClusterBlocks;
  return launch_clusters(kernel, grid, kPromptThreads, kPromptClusterBlocks, kPromptSharedBytes, params, config);
}

}  // namespace punica
