// What only sm_90a has: the bulk copy engine and its barriers, warpgroup products, shared memory of the cluster. Said in PTX.
#pragma once

#include <cuda.h>

#include "punica/primitives.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PUNICA_HOPPER 1
#endif

namespace punica {

#ifdef PUNICA_HOPPER

__device__ inline uint32_t shared_address(void const* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

// A value that the compiler keeps in a register: it would compute an address of shared memory anew wherever it is used, which takes longer than the load.
__device__ inline uint32_t kept(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Eight bytes of shared memory, zeros if not `wanted`: without a branch.
__device__ inline uint2 load_shared8_if(bool wanted, uint32_t address) {
  uint2 out;
  asm volatile(
      "{\n"
      "  .reg .pred wanted;\n"
      "  setp.ne.s32 wanted, %3, 0;\n"
      "  mov.b32 %0, 0;\n"
      "  mov.b32 %1, 0;\n"
      "  @wanted ld.shared.v2.b32 {%0, %1}, [%2];\n"
      "}"
      : "=&r"(out.x), "=&r"(out.y)
      : "r"(address), "r"(static_cast<int>(wanted)));
  return out;
}

__device__ inline uint2 load_shared8(uint32_t address) {
  uint2 out;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(out.x), "=r"(out.y) : "r"(address));
  return out;
}

__device__ inline uint32_t load_shared4(uint32_t address) {
  uint32_t out;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(out) : "r"(address));
  return out;
}

__device__ inline uint4 load_shared16(uint32_t address) {
  uint4 out;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w) : "r"(address));
  return out;
}

// Barriers, of which the address in shared memory is given. A phase ends when all have arrived and all promised bytes have come.
__device__ inline void init_barrier(uint32_t barrier, int arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)); }

__device__ inline void arrive(uint32_t barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }

// And promise so many bytes.
__device__ inline void arrive_for(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// `of`: what is seen of what was written before the phase ended.
#define PUNICA_AWAIT(of)                                               \
  asm volatile(                                                        \
      "{\n"                                                            \
      "  .reg .pred done;\n"                                           \
      "again:\n"                                                       \
      "  mbarrier.try_wait.parity" of ".shared::cta.b64 done, [%0], %1;\n" \
      "  @done bra over;\n"                                            \
      "  bra again;\n"                                                 \
      "over:\n"                                                        \
      "}" ::"r"(barrier),                                              \
      "r"(parity)                                                      \
      : "memory")

// Until the phase of that parity has ended.
__device__ inline void await(uint32_t barrier, uint32_t parity) { PUNICA_AWAIT(""); }

// And what other blocks of the cluster sent with the phase is seen.
__device__ inline void await_in_cluster(uint32_t barrier, uint32_t parity) { PUNICA_AWAIT(".acquire.cluster"); }

#undef PUNICA_AWAIT

// What others wrote before they wrote that is seen too.
__device__ inline int load_acquire(int const* pointer) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
  return value;
}

// What this thread sees in memory is seen by the copy engine.
__device__ inline void fence_copies_from_memory() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

__device__ inline void pause() { __nanosleep(40); }

// What was initialised is seen by the copy engine and by the cluster.
__device__ inline void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// How long the L2 cache should keep what is copied.
enum class Keep : uint64_t { kNormal = 0x1000000000000000, kFirst = 0x12f0000000000000, kLast = 0x14f0000000000000 };

// A box of a matrix [rows, columns], from (row, column) on; zeros where it ends.
__device__ inline void copy_box(uint32_t to, CUtensorMap const& map, int column, int row, uint32_t barrier, Keep keep) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "l"(static_cast<uint64_t>(keep))
      : "memory");
}

// A box of rows that start anywhere, in a matrix [starts, rows, columns], from `row` on.
__device__ inline void copy_box_at(uint32_t to, CUtensorMap const& map, int row, int start, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to), "l"(&map), "r"(barrier),
               "r"(0), "r"(row), "r"(start)
               : "memory");
}

// `bytes` that lie together. Both addresses and the number are multiples of 16.
__device__ inline void copy_bulk(uint32_t to, void const* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ inline void fetch_map(CUtensorMap const& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// An operand of a warpgroup product: rows of 128 bytes of K, swizzled by 128 bytes, eight rows in 1024 bytes.
__device__ inline uint64_t operand_at(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most so many committed groups are not done.
template <int kPending>
__device__ inline void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Where `address` of this block's shared memory lies in another block of the cluster.
__device__ inline uint32_t address_in_block(uint32_t address, int block) {
  uint32_t out;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(address), "r"(block));
  return out;
}

// Two tiles of 8 x 8 elements, of which lane 4 g + q has (g, 2 q) and (g, 2 q + 1), turned: lanes 0 .. 7 say where the columns of the first come, 16 bytes each, and
// lanes 8 .. 15 those of the second. By a warp.
__device__ inline void store_turned(uint32_t address, uint32_t first, uint32_t second) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(first), "r"(second) : "memory");
}

// From here on a thread of the warpgroup has so many registers, a multiple of 8: some warpgroups give theirs away, then others take them. A block cannot
// have more than it was launched with.
template <int kRegisters>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The bytes count at a barrier that lies in the same block as `address`.
__device__ inline void send16(uint32_t address, float4 value, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address), "f"(value.x), "f"(value.y),
               "f"(value.z), "f"(value.w), "r"(barrier)
               : "memory");
}

// At a barrier of another block of the cluster. What the warp has loaded from shared memory by then may be overwritten. Not at the scope of the cluster: that would
// wait for stores to memory.
__device__ inline void arrive_in_cluster(uint32_t barrier) { asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory"); }

// Of `threads` of the block, which all come here.
__device__ inline void named_barrier(int number, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory"); }

#endif

// How many clusters the GPU has room for at the same time.
template <typename Params>
int clusters_at_once(void (*kernel)(Params), int block, int cluster, int shared_bytes) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t launch_config{};
  launch_config.gridDim = dim3(cluster);
  launch_config.blockDim = dim3(block);
  launch_config.dynamicSmemBytes = shared_bytes;
  launch_config.attrs = &attribute;
  launch_config.numAttrs = 1;
  int clusters = 0;
  return cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch_config) == cudaSuccess ? clusters : 0;
}

// In clusters of so many blocks.
template <typename Params>
cudaError_t launch_clusters(void (*kernel)(Params), int grid, int block, int cluster, int shared_bytes, Params const& params, LaunchConfig const& config) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch_config{};
  launch_config.gridDim = dim3(grid);
  launch_config.blockDim = dim3(block);
  launch_config.dynamicSmemBytes = shared_bytes;
  launch_config.stream = config.stream;
  launch_config.attrs = attributes;
  launch_config.numAttrs = 2;
  return cudaLaunchKernelEx(&launch_config, kernel, params);
}

}  // namespace punica
