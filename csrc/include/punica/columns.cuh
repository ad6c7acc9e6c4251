// A warp's tile of 64 output columns by 8 or 16 rows: what lora_expand and segment_gemm share.
//
// The weight matrix [O, K] gives the rows of the tensor-core tile, the step's rows its columns. The four 16-row tiles are
// assigned so that lane group g owns the eight consecutive output columns 8g .. 8g+7: weights load 16 bytes at a time, and so
// does y.
#pragma once

#include "punica/tile.cuh"

namespace punica {

constexpr int kWarpColumns = 64;
constexpr int kChunk = 32;  // K elements of one load per lane and row

// Eight weight rows (output columns) of a lane, one chunk of K.
struct WeightChunk {
  Vec8 row[8];
};

// Rows of a weight matrix of a warp: `rows` exist from `base` on (may be <= 0), `depth` elements of each matter.
template <typename T>
struct WeightRows {
  T const* base;  // row of the lane's first output column
  int rows;
  int pitch;
  int depth;
};

template <typename T>
__device__ inline WeightRows<T> weight_rows(T const* matrix, int first_column, int num_columns, int pitch, int depth) {
  int const column = first_column + threadIdx.x % 32 / 4 * 8;
  return {matrix + static_cast<int64_t>(column) * pitch, num_columns - column, pitch, depth};
}

template <typename T>
__device__ inline WeightChunk load_weights(WeightRows<T> const& weights, int chunk) {
  int const k = chunk * kChunk + threadIdx.x % 4 * 8;
  WeightChunk out;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    out.row[i] = load8<Source::kConstant, true>(weights.base + static_cast<int64_t>(i) * weights.pitch + k,
                                                i < weights.rows ? weights.depth - k : 0);
  if (weights.depth % 8 != 0 && k < weights.depth && k + 8 > weights.depth) {
#pragma unroll
    for (int i = 0; i < 8; ++i) keep_first(out.row[i], weights.depth - k);
  }
  return out;
}

template <typename T, int kRowTiles>
__device__ inline void multiply(float (&acc)[4][kRowTiles][4], WeightChunk const& weights, Vec8 const (&rows)[kRowTiles]) {
#pragma unroll
  for (int m = 0; m < 4; ++m)
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) mma_16x8x32<T>(acc[m][n], weights.row[2 * m], weights.row[2 * m + 1], rows[n]);
}

// The lane's part of the result for output row 8 n + 2 q + side: eight consecutive columns.
template <int kRowTiles>
__device__ inline void columns_of(float (&out)[8], float const (&acc)[4][kRowTiles][4], int n, int side) {
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    out[2 * m] = acc[m][n][side];
    out[2 * m + 1] = acc[m][n][side + 2];
  }
}

// Row gain and bias of eight columns from `column` on, `valid` of which exist.
template <typename T>
__device__ inline void apply_affine(float (&out)[8], T const* arena, TableRecord const& record, int column, int valid) {
  if (record.gain_offset >= 0) {
    Vec8 const gain = load8<Source::kConstant, true>(arena + record.gain_offset + column, valid);
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] *= get<T>(gain, i);
  }
  if (record.bias_offset >= 0) {
    Vec8 const bias = load8<Source::kConstant, true>(arena + record.bias_offset + column, valid);
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] += get<T>(bias, i);
  }
}

template <typename T, bool kAligned>
__device__ inline void store8(T* pointer, float const (&values)[8], int valid) {
  Vec8 out;
#pragma unroll
  for (int i = 0; i < 8; ++i) set<T>(out, i, values[i]);
  if constexpr (kAligned) {
    if (valid > 0) *reinterpret_cast<uint4*>(pointer) = out.raw;
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < valid) memcpy(pointer + i, &out.element[i], 2);
  }
}

}  // namespace punica
