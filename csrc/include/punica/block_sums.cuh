// Sums over a warp and a block, and what the blocks of a cluster tell each other.
#pragma once

#include "punica/cluster.cuh"

namespace punica {

constexpr unsigned kAllLanes = ~0u;

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

__device__ inline void sync(Cluster const& cluster) {
  cluster.arrive();
  cluster.wait();
}

// Gives `value` of the first threads to slot `rank` of every block; afterwards all blocks have all slots. A set of slots
// serves once: a fast block may already write to the next.
template <typename V>
__device__ inline void share(Cluster const& cluster, V (&slots)[kMaxClusterBlocks], V const& value) {
  int const block = threadIdx.x;
  if (block < cluster.size) *cluster.in_block(&slots[cluster.rank], block) = value;
  sync(cluster);
}

}  // namespace punica
