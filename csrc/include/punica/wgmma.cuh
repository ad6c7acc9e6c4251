// d[64 x N] += a[64 x 16] * b[N x 16]^T by a warpgroup, both operands in shared memory, fp32 accumulation: one instruction for each
// N that is used. Lane 4 g + q of warp w holds d[4 j + i]: row 16 w + g + i / 2 * 8, column 8 j + 2 q + i % 2.
#pragma once

#include "punica/hopper.cuh"

namespace punica {

#ifdef PUNICA_HOPPER

#define PUNICA_FLOATS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PUNICA_FLOATS_8(d, i) PUNICA_FLOATS_4(d, i), PUNICA_FLOATS_4(d, i + 4)
#define PUNICA_FLOATS_16(d, i) PUNICA_FLOATS_8(d, i), PUNICA_FLOATS_8(d, i + 8)
#define PUNICA_FLOATS_24(d, i) PUNICA_FLOATS_16(d, i), PUNICA_FLOATS_8(d, i + 16)
#define PUNICA_FLOATS_32(d, i) PUNICA_FLOATS_16(d, i), PUNICA_FLOATS_16(d, i + 16)
#define PUNICA_FLOATS_64(d, i) PUNICA_FLOATS_32(d, i), PUNICA_FLOATS_32(d, i + 32)

#define PUNICA_PRODUCT(rows, dtype, registers, floats, a_register, b_register) \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" rows "k16.f32." dtype "." dtype " {" registers "}, " a_register ", " b_register ", 1, 1, 1, 0, 0;" \
               : floats \
               : "l"(a), "l"(b))

#define PUNICA_PRODUCT_OF(count, rows, registers, a_register, b_register) \
  template <typename T> \
  __device__ inline void multiply_warpgroup(float (&d)[count], uint64_t a, uint64_t b) { \
    if constexpr (__is_same(T, __half)) { \
      PUNICA_PRODUCT(#rows, "f16", registers, PUNICA_FLOATS_##count(d, 0), a_register, b_register); \
    } else { \
      PUNICA_PRODUCT(#rows, "bf16", registers, PUNICA_FLOATS_##count(d, 0), a_register, b_register); \
    } \
  }

PUNICA_PRODUCT_OF(4, 8,
    "%0, %1, %2, %3",
    "%4", "%5")
PUNICA_PRODUCT_OF(8, 16,
    "%0, %1, %2, %3, %4, %5, %6, %7",
    "%8", "%9")
PUNICA_PRODUCT_OF(16, 32,
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",
    "%16", "%17")
PUNICA_PRODUCT_OF(24, 48,
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
    "%16, %17, %18, %19, %20, %21, %22, %23",
    "%24", "%25")
PUNICA_PRODUCT_OF(32, 64,
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
    "%32", "%33")
PUNICA_PRODUCT_OF(64, 128,
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63",
    "%64", "%65")
#undef PUNICA_PRODUCT_OF
#undef PUNICA_PRODUCT

#endif

}  // namespace punica
