// Blocks that work on one row together, and the shared memory they see. From sm_90 on the blocks of a cluster write into each
// other's; before, a block is a cluster of its own and the same code runs. The tests run the kernels on a CPU by putting a
// header of this name before this one.
#pragma once

#include <cooperative_groups.h>

#include "punica/params.h"

namespace punica {

constexpr int kMaxClusterBlocks = 8;
constexpr int kSampleThreads = 512;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

struct Cluster {
  int const rank = static_cast<int>(cooperative_groups::this_cluster().block_rank());
  int const size = static_cast<int>(cooperative_groups::this_cluster().num_blocks());

  // Between the two lies what needs no other block. Writes before arrive() are seen after wait(), in the whole cluster. By whole warps, which come
  // together here.
  __device__ void arrive() const {
    __syncwarp();
    cooperative_groups::this_cluster().barrier_arrive();
  }
  __device__ void wait() const {
    __syncwarp();
    cooperative_groups::this_cluster().barrier_wait();
  }
  // As arrive(), but of what was written only barriers of the copy engine are seen, which were fenced.
  __device__ void arrive_begun() const {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }

  // Where `local`, a variable in shared memory, lies in another block.
  template <typename V>
  __device__ V* in_block(V* local, int block) const {
    return cooperative_groups::this_cluster().map_shared_rank(local, block);
  }
};

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
};

#endif

// The block's variables in shared memory. One type a kernel.
template <typename V>
__device__ inline V& block_shared() {
  __shared__ V shared;
  return shared;
}

// The block's shared memory beyond that, as much as the launch asked for.
__device__ inline uint32_t* block_cache() {
  extern __shared__ uint4 words[];
  return reinterpret_cast<uint32_t*>(words);
}

}  // namespace punica
