// What is said in PTX or to the CUDA runtime: loads, the tensor core, dependent launch. The tests run the
// kernels on a CPU by putting a header of this name before this one.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "punica/params.h"

namespace punica {

// Loads of data that is constant while kernels run (weights) may use L1; data that an earlier kernel writes must not: with
// dependent launch, an L1 line can be older than the write.
enum class Source { kConstant, kActivation };

template <Source kSource>
__device__ inline uint4 load16(void const* pointer) {
  auto const* vec = static_cast<uint4 const*>(pointer);
  return kSource == Source::kConstant ? __ldg(vec) : __ldcg(vec);
}

template <Source kSource>
__device__ inline uint16_t load2(void const* pointer) {
  auto const* element = static_cast<unsigned short const*>(pointer);
  return kSource == Source::kConstant ? __ldg(element) : __ldcg(element);
}

// As load16 of constant data, but asked for where it is said: told that the data is constant, the compiler moves such loads behind the stores
// that follow them, to where they are needed next.
__device__ inline uint4 load16_now(void const* pointer) {
  uint4 out;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w) : "l"(pointer) : "memory");
  return out;
}

// Four floats that an earlier kernel wrote, zeros if not `wanted`: without a branch.
__device__ inline float4 load_floats_if(bool wanted, float const* pointer) {
  float4 out;
  asm volatile(
      "{\n"
      "  .reg .pred wanted;\n"
      "  setp.ne.s32 wanted, %5, 0;\n"
      "  mov.f32 %0, 0f00000000;\n"
      "  mov.f32 %1, 0f00000000;\n"
      "  mov.f32 %2, 0f00000000;\n"
      "  mov.f32 %3, 0f00000000;\n"
      "  @wanted ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "=&f"(out.x), "=&f"(out.y), "=&f"(out.z), "=&f"(out.w)
      : "l"(pointer), "r"(static_cast<int>(wanted)));
  return out;
}

// d[16 x 8] += a[16 x 16] * b[16 x 8], fp32 accumulation. Lane l = 4 g + q holds: a words (row g, k 2q..), (row g+8, k 2q..),
// (row g, k 2q+8..), (row g+8, k 2q+8..); b words (k 2q.., column g), (k 2q+8.., column g); d (row g, columns 2q, 2q+1),
// (row g+8, columns 2q, 2q+1).
template <typename T>
__device__ inline void mma_16x8x16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                   uint32_t b1) {
  if constexpr (sizeof(T) == 2 && __is_same(T, __half)) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// Where the call was wrong in a way that the host cannot see: the kernel stops with an error, and neither waits for ever nor writes where it must not.
__device__ inline void demand(bool holds) {
  if (!holds) __trap();
}

__device__ inline void add(int* counter, int number) { atomicAdd(counter, number); }

// Adds one; returns what it was.
__device__ inline int count(int* counter) { return atomicAdd(counter, 1); }

// As `count`, in order: what the thread has written or seen by then is seen by whoever counts later, and it sees what those before did.
__device__ inline int count_in_order(int* counter) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

__device__ inline unsigned warp_min(unsigned value) { return __reduce_min_sync(~0u, value); }

__device__ inline float shuffle_xor(float value, int distance) { return __shfl_xor_sync(~0u, value, distance); }
__device__ inline int shuffle(int value, int lane) { return __shfl_sync(~0u, value, lane); }

// Lane 4 g + q gives the 16-bit elements of row g, columns 2q and 2q + 1, of a matrix [8 x 8], and gets those of the transposed.
__device__ inline uint32_t transposed_8x8(uint32_t pair) {
  uint32_t out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
}

// a / b for 0 <= a < 2^24, b > 0 and a / b < 2^20, in a third of the instructions that the compiler takes for any int: an approximate quotient,
// put right by one.
__device__ inline int quotient(int a, int b) {
  int const near = static_cast<int>(__fdividef(static_cast<float>(a), static_cast<float>(b)));
  int const rest = a - near * b;
  return near + (rest >= b) - (rest < 0);
}

// Sum over the four lanes of a quad, the same bits in each.
__device__ inline float4 quad_sum(float4 value) {
#pragma unroll
  for (int other = 1; other <= 2; other *= 2) {
    value.x += __shfl_xor_sync(~0u, value.x, other);
    value.y += __shfl_xor_sync(~0u, value.y, other);
    value.z += __shfl_xor_sync(~0u, value.z, other);
    value.w += __shfl_xor_sync(~0u, value.w, other);
  }
  return value;
}

// Programmatic dependent launch. After wait_for_previous() all writes of the kernel before are visible; start_next() lets the
// next kernel's blocks start as soon as every block of this one has called it. Every block waits at some time, also one
// without work: else a kernel could end before the one before it, and the kernel after would start too early. Before the
// wait only plan, table and arena may be read. A compiled kernel waits only before it reads what the kernel right in front of
// it wrote, so a kernel that it may follow calls start_next() after its own wait, unless all it writes is what that one reads.
__device__ inline void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ inline void start_next() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Asks for `bytes` (a multiple of 16) to be brought into the L2 cache, and goes on. Nothing is read before sm_90.
__device__ inline void prefetch(void const* pointer, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(pointer), "r"(bytes) : "memory");
#endif
}

// Plan and tables are read by every layer, between base products that stream more weights than the L2 cache holds: ask it to
// keep them.
__device__ inline int4 load_metadata(int4 const* pointer) {
  int4 out;
  asm("{\n"
      "  .reg .b64 keep;\n"
      "  createpolicy.fractional.L2::evict_last.b64 keep, 1.0;\n"
      "  ld.global.nc.L2::cache_hint.v4.s32 {%0, %1, %2, %3}, [%4], keep;\n"
      "}"
      : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
      : "l"(pointer));
  return out;
}

template <typename Params>
cudaError_t launch(void (*kernel)(Params), int grid, int block, Params const& params, LaunchConfig const& config) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch_config{};
  launch_config.gridDim = dim3(grid);
  launch_config.blockDim = dim3(block);
  launch_config.stream = config.stream;
  launch_config.attrs = &attribute;
  launch_config.numAttrs = config.dependent_launch ? 1 : 0;
  return cudaLaunchKernelEx(&launch_config, kernel, params);
}

}  // namespace punica
