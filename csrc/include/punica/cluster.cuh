// Blocks that work on one row together, and sums over a block. From sm_90 on the blocks of a cluster write into each other's
// shared memory; before, a block is a cluster of its own and the same code runs.
#pragma once

#include <cooperative_groups.h>

#include "punica/params.h"

namespace punica {

constexpr int kMaxClusterBlocks = 8;
constexpr unsigned kAllLanes = ~0u;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

struct Cluster {
  int const rank = static_cast<int>(cooperative_groups::this_cluster().block_rank());
  int const size = static_cast<int>(cooperative_groups::this_cluster().num_blocks());

  // Between the two lies what needs no other block. Writes before arrive() are seen after wait(), in the whole cluster.
  __device__ void arrive() const { cooperative_groups::this_cluster().barrier_arrive(); }
  __device__ void wait() const { cooperative_groups::this_cluster().barrier_wait(); }

  // Where `local`, a variable in shared memory, lies in another block.
  template <typename V>
  __device__ V* in_block(V* local, int block) const {
    return cooperative_groups::this_cluster().map_shared_rank(local, block);
  }
#else

struct Cluster {
  int const rank = 0;
  int const size = 1;

  __device__ void arrive() const {}
  __device__ void wait() const { __syncthreads(); }

  template <typename V>
  __device__ V* in_block(V* local, int) const {
    return local;
  }
#endif

  __device__ void sync() const {
    arrive();
    wait();
  }

  // Gives `value` of the first threads to slot `rank` of every block; afterwards all blocks have all slots. A set of slots
  // serves once: a fast block may already write to the next.
  template <typename V>
  __device__ void share(V (&slots)[kMaxClusterBlocks], V const& value) const {
    if (static_cast<int>(threadIdx.x) < size) *in_block(&slots[rank], threadIdx.x) = value;
    sync();
  }
};

__device__ inline uint64_t warp_sum(uint64_t value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

__device__ inline uint64_t warp_max(uint64_t value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    uint64_t const other = __shfl_xor_sync(kAllLanes, value, offset);
    value = value > other ? value : other;
  }
  return value;
}

// Sum of the values of the threads before this one. The whole block calls it; warp_sums serves again after the next barrier.
template <int kWarps>
__device__ inline uint64_t sum_before(uint64_t value, uint64_t (&warp_sums)[kWarps]) {
  int const lane = threadIdx.x % 32;
  int const warp = threadIdx.x / 32;
  uint64_t through = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    uint64_t const other = __shfl_up_sync(kAllLanes, through, offset);
    if (lane >= offset) through += other;
  }
  if (lane == 31) warp_sums[warp] = through;
  __syncthreads();
  uint64_t before = through - value;
  for (int other = 0; other < warp; ++other) before += warp_sums[other];
  return before;
}

}  // namespace punica
