// v = x A^T for steps of many rows, on sm_90a: all slices of a tile of 64 rows from one read of x.
//
// A cluster takes a tile, and its blocks take turns at the steps of 64 columns. The copy engine brings x and A into a ring of stages in shared memory, as far
// ahead as there is room, into the next tile too; a warpgroup multiplies. The low ranks of all slices lie behind one another in groups of sixteen. Then each
// block gets from all others, by stores into its shared memory, their sums of its share of the rows, adds them in the order of the blocks and writes the
// low-rank rows: no parts in memory, no counters.
#pragma once

#include "punica/cluster.cuh"
#include "punica/hopper.cuh"
#include "punica/per_device.h"
#include "punica/prompt_memory.cuh"
#include "punica/prompt_walk.cuh"
#include "punica/shrink.cuh"
#include "punica/wgmma.cuh"

namespace punica {

constexpr int kPromptBlocksPerSm = 2;  // with one, fewer clusters than tiles of 1,024 rows find eight multiprocessors together
constexpr int kLargeCluster = 8;  // of blocks
constexpr int kSmallCluster = 4;
constexpr int kLargeClusterRows = 31 * kMaxTileRows;  // an H200 has room for 30 large clusters at once, and for 62 small ones
constexpr int kMultipliers = 128;
constexpr int kPromptThreads = kMultipliers + 2 * 32;

#ifdef PUNICA_HOPPER

// By a warp, a box by each lane; one box if it can be a tall one, which may hold rows behind the tile.
template <int kBlocks>
__device__ inline void bring_x(PromptParams const& params, PromptSteps<kBlocks> const& steps, StageRing ring) {
  int const lane = threadIdx.x % 32;
  PromptWalk<kBlocks> walk(params.shrink.tables);
  wait_for_previous();
#pragma unroll 1
  for (; !walk.done(); walk.look_ahead(), walk.advance()) {
    int const boxes = (walk.tile().rows.y + kPromptBoxRows - 1) / kPromptBoxRows;
    int const row = walk.tile().rows.x + lane * kPromptBoxRows;
    int const num_groups = walk.tile().num_groups();
#pragma unroll 1
    for (int group = 0; group < num_groups; group += kPassGroups)
#pragma unroll 1
      for (int step = 0; step < steps.count; ++step) {
        __syncwarp();
        ring.await_empty();
        if (lane == 0) arrive_for(ring.full(), boxes * kPromptBoxBytes);
        if (boxes == kMaxTileRows / kPromptBoxRows) {
          if (lane == 0) copy_box(ring.memory(), params.tall_x, steps.column(step), row, ring.full(), Keep::kNormal);
        } else if (lane < boxes) {
          copy_box(ring.memory() + lane * kPromptBoxBytes, params.x, steps.column(step), row, ring.full(), Keep::kNormal);
        }
        ring.advance();
      }
  }
}

// By a warp, a group by each lane, or four that lie behind one another. The rows of a group that its adapter does not have are of something else, and their products are not used.
template <int kBlocks>
__device__ inline void bring_a(PromptParams const& params, PromptSteps<kBlocks> const& steps, int rank_pitch, StageRing ring) {
  int const lane = threadIdx.x % 32;
  int const starts = params.shrink.in_features / kStartElements;
  PromptWalk<kBlocks> walk(params.shrink.tables);
#pragma unroll 1
  for (; !walk.done(); walk.look_ahead(), walk.advance()) {
    for (int const lora_rank : walk.tile().lora_rank) demand(lora_rank <= rank_pitch);
    int const all_groups = walk.tile().num_groups();
#pragma unroll 1
    for (int first = 0; first < all_groups; first += kPassGroups) {
      int const num_groups = min(kPassGroups, all_groups - first);
      RankGroup const group = walk.tile().group(first + lane);
      int const slice = lane < num_groups ? group.slice : -1;
      int const of_first = shuffle(slice, lane / kProductGroups * kProductGroups);
      int const of_last = shuffle(slice, lane | (kProductGroups - 1));
      bool const in_tall = of_last >= 0 && of_first == of_last;
      uint64_t const begin = static_cast<uint64_t>(group.a_offset + params.a_shift) / kStartElements;
      int row = static_cast<int>(begin / starts) + group.rank_start;
      int start = static_cast<int>(begin % starts) + steps.column(0) / kStartElements;
#pragma unroll 1
      for (int step = 0; step < steps.count; ++step) {
        while (start >= starts) {
          start -= starts;
          ++row;
        }
        __syncwarp();
        ring.await_empty();
        if (lane == 0) arrive_for(ring.full(), num_groups * kPromptBoxBytes);
        uint32_t const to = ring.memory() + kPromptXBytes + lane * kPromptBoxBytes;
        if (in_tall) {
          if (lane % kProductGroups == 0) copy_box_at(to, params.tall_a, row, start, ring.full());
        } else if (lane < num_groups) {
          copy_box_at(to, params.a, row, start, ring.full());
        }
        start += kBlocks * kPromptColumns / kStartElements;
        ring.advance();
      }
    }
  }
}

// Sums of the block's steps.
template <typename T, int kProducts, int kSums>
__device__ inline void multiply_prompt(int num_steps, StageRing& ring, float (&d)[kProducts][kSums]) {
#pragma unroll 1
  for (int step = 0; step < num_steps; ++step) {
    ring.await_full();
    uint64_t const x = operand_at(ring.memory());
    uint64_t const a = operand_at(ring.memory() + kPromptXBytes);
    begin_products();
#pragma unroll
    for (int k = 0; k < kPromptColumns / 16; ++k)
#pragma unroll
      for (int i = 0; i < kProducts; ++i) multiply_warpgroup<T>(d[i], x + 2 * k, a + i * (kProductGroups * kPromptBoxBytes >> 4) + 2 * k);
    commit_products();
    await_products<0>();
    if (threadIdx.x % 32 == 0) arrive(ring.empty());
    ring.advance();
  }
}

// What a block needs to turn sums into low-rank rows.
struct PromptBlock {
  ShrinkParams const& params;
  int num_steps;
  int rank_pitch;
  int block;
};

// The low-rank rows of a pass. `walk` has seen the next tile then.
template <typename T, int kProducts, int kRanks, int kBlocks>
__device__ inline void shrink_pass(PromptBlock const& own, StageRing& ring, Mail<kBlocks>& mail, PromptWalk<kBlocks>& walk, int first_group) {
  constexpr int kOwnOctets = kOctets / kBlocks;
  constexpr int kSums = kMailGroups * kOwnOctets / (kMultipliers / 32);  // of a lane
  float d[kProducts][kRanks / 2] = {};
  multiply_prompt<T>(own.num_steps, ring, d);
  PromptTile const tile = walk.tile();
#pragma unroll
  for (int first_product = 0; first_product < kProducts; first_product += kMailProducts) {
    int const first = first_group + first_product * kProductGroups;
    int const num_groups = min(min(kMailProducts, kProducts - first_product) * kProductGroups, tile.num_groups() - first);
    mail.await_read();
    mail.send(d, first_product, num_groups);
    if (first_product + kMailProducts >= kProducts) walk.look_ahead();
    mail.await_there();
    auto const index_of = [](int i) { return i * (kMultipliers / 32) + static_cast<int>(threadIdx.x) / 32; };
    float4 sums[kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i)
      if (index_of(i) < num_groups * kOwnOctets) sums[i] = mail.sum(index_of(i));
    mail.give_back();
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      int const t = (own.block * kOwnOctets + index_of(i) % kOwnOctets) * 8 + static_cast<int>(threadIdx.x) % 32 / 4;
      if (index_of(i) >= num_groups * kOwnOctets || t >= tile.rows.y) continue;
      RankGroup const group = tile.group(first + index_of(i) / kOwnOctets);
      int const rank = group.rank_start + static_cast<int>(threadIdx.x) % 4 * 4;
      if (rank >= round_up(group.lora_rank, kRowAlignment)) continue;
      ShrinkItem const item{.row_start = tile.rows.x, .rank_start = rank, .rank_pitch = own.rank_pitch, .slice = group.slice};
      store_hidden<T>(own.params, hidden_offset(own.params, item, t), sums[i], group.lora_rank - rank);
    }
  }
}

template <typename T, int kBlocks>
__device__ inline void shrink_tiles(PromptBlock const& own, Cluster const& cluster, StageRing ring, Mail<kBlocks> mail) {
  PromptWalk<kBlocks> walk(own.params.tables);
  cluster.wait();
  wait_for_previous();
#pragma unroll 1
  for (; !walk.done(); walk.advance()) {
    int const num_groups = walk.tile().num_groups();
    if (num_groups == 0) walk.look_ahead();
#pragma unroll 1
    for (int group = 0; group < num_groups; group += kPassGroups) {
      int const left = num_groups - group;
      if (left == 1) {
        shrink_pass<T, 1, 16>(own, ring, mail, walk, group);
      } else if (left == 2) {
        shrink_pass<T, 1, 32>(own, ring, mail, walk, group);
      } else if (left == 3) {
        shrink_pass<T, 1, 48>(own, ring, mail, walk, group);
      } else if (left == kProductGroups) {
        shrink_pass<T, 1, 64>(own, ring, mail, walk, group);
      } else if (left <= 2 * kProductGroups) {
        shrink_pass<T, 2, 64>(own, ring, mail, walk, group);
      } else {
        shrink_pass<T, 3, 64>(own, ring, mail, walk, group);
      }
    }
  }
  mail.await_read();  // nobody arrives at a block that has ended
}

template <typename T, int kBlocks>
__device__ inline void prompt_block(PromptParams const& params) {
  auto& shared = block_shared<PromptShared>();
  Cluster const cluster;
  int const block = blockIdx.x % kBlocks;
  uint32_t const memory = kept(round_up(shared_address(block_cache()), 1024));
  start_next();
  if (threadIdx.x == kMultipliers) {
    for (int i = 0; i < kMostStages; ++i) {
      init_barrier(shared_address(&shared.full[i]), 2);
      init_barrier(shared_address(&shared.empty[i]), kMultipliers / 32);
    }
    init_barrier(shared_address(&shared.mail_there), 1);
    init_barrier(shared_address(&shared.mail_read), kBlocks * kMultipliers / 32);
    for (CUtensorMap const* map : {&params.x, &params.tall_x, &params.a, &params.tall_a}) fetch_map(*map);
    fence_barriers();
  }
  __syncthreads();
  cluster.arrive_begun();  // nobody sends to a block that has not begun
  PromptLayout const layout(params.shrink.tables, params.shrink.scratch);
  PromptSteps<kBlocks> const steps(params.shrink.in_features, block);
  StageRing const ring(shared, memory, layout);
  if (threadIdx.x < kMultipliers) {
    Mail<kBlocks> const mail(shared, memory + layout.num_stages * layout.stage_bytes, layout.mail_groups, block);
    shrink_tiles<T>({params.shrink, steps.count, layout.rank_pitch, block}, cluster, ring, mail);
  } else {
    if (threadIdx.x < kMultipliers + 32) {
      bring_a(params, steps, layout.rank_pitch, ring);
    } else {
      bring_x(params, steps, ring);
    }
    cluster.wait();
  }
}

#endif

template <typename T, int kBlocks>
__global__ void __launch_bounds__(kPromptThreads, kPromptBlocksPerSm) prompt_kernel(const __grid_constant__ PromptParams params) {
#ifdef PUNICA_HOPPER
  prompt_block<T, kBlocks>(params);
#else
  __trap();  // compiled for 90 instead of 90a: there would be no result
#endif
}

// Clusters of either size that a GPU has room for at the same time.
struct PromptRoom {
  int large;
  int small;
};

template <typename T, int kBlocks>
int prompt_room() {
  auto* const kernel = prompt_kernel<T, kBlocks>;
  bool const asked = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kPromptSharedBytes) == cudaSuccess &&
                     cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared) == cudaSuccess;
  int const room = asked ? clusters_at_once(kernel, kPromptThreads, kBlocks, kPromptSharedBytes) : 0;
  if (room == 0) static_cast<void>(cudaGetLastError());  // that there is none is no error of a later call
  return room;
}

template <typename T>
PromptClusters prompt_clusters(Scratch const& scratch, LaunchConfig const& config) {
  static PerDevice<PromptRoom> rooms;
  PromptRoom const room = rooms.of(config.device, [] { return PromptRoom{prompt_room<T, kLargeCluster>(), prompt_room<T, kSmallCluster>()}; });
  bool const large = room.large > 0 && (scratch.num_rows <= kLargeClusterRows || room.small == 0);
  int const blocks = large ? kLargeCluster : kSmallCluster;
  // Clusters that wait for a place would begin their first tile last.
  return {blocks, min(max(scratch.num_blocks / blocks, 1), large ? room.large : room.small)};
}

template <typename T>
cudaError_t launch_prompt(PromptParams const& params, LaunchConfig const& config) {
  PromptClusters const clusters = prompt_clusters<T>(params.shrink.scratch, config);
  if (clusters.count < 1) return cudaErrorInvalidClusterSize;
  auto* const kernel = clusters.blocks == kLargeCluster ? prompt_kernel<T, kLargeCluster> : prompt_kernel<T, kSmallCluster>;
  return launch_clusters(kernel, clusters.count * clusters.blocks, kPromptThreads, clusters.blocks, kPromptSharedBytes, params, config);
}

}  // namespace punica
