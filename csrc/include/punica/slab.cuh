// Weights in shared memory on their way to the tensor cores: asynchronous copies and the layout that both sides agree on.
//
// A slab is 64 output columns by 16 ranks of B. A column takes 32 bytes; after each eight columns 32 bytes are left out, so
// that the four lane groups of half a warp, which read columns eight apart, meet different banks.
#pragma once

#include "punica/tile.cuh"

namespace punica {

constexpr int kSlabRanks = 16;
constexpr int kSlabColumnBytes = 2 * kSlabRanks;
constexpr int kSlabGroupBytes = 9 * kSlabColumnBytes;  // eight columns and the gap
constexpr int kSlabBytes = 8 * kSlabGroupBytes - kSlabColumnBytes;
static_assert(kSlabBytes % 16 == 0 && kSlabGroupBytes % 128 == 32);

// Copies ranks [0, depth) of columns [0, columns) of B, `pitch` elements a column, into ceil(depth / 16) slabs; the rest of
// these slabs becomes zero. kLanes lanes of kThreads threads share a column: as many as it has pieces of 16 bytes, at most
// 8, so that a warp reads whole cache lines.
template <int kLanes, int kThreads, typename T>
__device__ inline void copy_slabs(char* slabs, T const* b, int pitch, int columns, int depth, int thread) {
  constexpr int kColumns = kThreads / kLanes;  // of a pass
  int const piece = thread % kLanes;
  int const bytes = min(max(depth - piece * 8, 0), 8) * 2;
  if constexpr (kLanes > 2) {
    if (piece >= (depth + kSlabRanks - 1) / kSlabRanks * 2) return;  // the slab does not exist
  }
  int const first = thread / kLanes;
  T const* from = b + static_cast<int64_t>(first) * pitch + piece * 8;
  char* to = slabs + piece / 2 * kSlabBytes + first / 8 * kSlabGroupBytes + first % 8 * kSlabColumnBytes + piece % 2 * 16;
#pragma unroll
  for (int pass = 0; pass < 64 / kColumns; ++pass) {
    static_assert(kColumns % 8 == 0 || 8 % kColumns == 0);
    copy16_async(to, from, first + pass * kColumns < columns ? bytes : 0);
    from += kColumns * pitch;
    if constexpr (kColumns % 8 == 0) {
      to += kColumns / 8 * kSlabGroupBytes;
    } else {
      to += (pass + 1) * kColumns % 8 == 0 ? kSlabGroupBytes - (8 - kColumns) * kSlabColumnBytes : kColumns * kSlabColumnBytes;
    }
  }
}

// Up to 64 ranks.
template <int kThreads, typename T>
__device__ inline void copy_slabs(char* slabs, T const* b, int pitch, int columns, int depth, int thread) {
  if (depth <= 16) {
    copy_slabs<2, kThreads>(slabs, b, pitch, columns, depth, thread);
  } else if (depth <= 32) {
    copy_slabs<4, kThreads>(slabs, b, pitch, columns, depth, thread);
  } else {
    copy_slabs<8, kThreads>(slabs, b, pitch, columns, depth, thread);
  }
}

// acc += B of a slab (64 columns) times 8 kRowTiles low-rank rows, of which row tiles [0, tiles) exist. A lane takes ranks
// 4q .. 4q+3 of both operands: a sum over ranks may run in any order.
template <typename T, int kRowTiles>
__device__ inline void multiply_slab(float (&acc)[4][kRowTiles][4], char const* slab, T const* rows, int row_pitch, int tiles) {
  int const lane = threadIdx.x % 32;
  char const* const from = slab + lane / 4 * kSlabGroupBytes + lane % 4 * 8;
  uint2 weights[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) weights[i] = *reinterpret_cast<uint2 const*>(from + i * kSlabColumnBytes);
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
    if (n > 0 && n >= tiles) break;
    uint2 const row = *reinterpret_cast<uint2 const*>(rows + (n * 8 + lane / 4) * row_pitch + lane % 4 * 4);
#pragma unroll
    for (int m = 0; m < 4; ++m)
      mma_16x8x16<T>(acc[m][n], weights[2 * m].x, weights[2 * m + 1].x, weights[2 * m].y, weights[2 * m + 1].y, row.x, row.y);
  }
}

}  // namespace punica
