// A warp's tile of 64 output columns by 8 or 16 rows, as segment_gemm has it; gain, bias and stores are lora_expand's too.
//
// The weight matrix [O, K] gives the rows of the tensor-core tile, the step's rows its columns. The four 16-row tiles are
// assigned so that lane group g owns the eight consecutive output columns 8g .. 8g+7: weights load 16 bytes at a time, and so
// does y.
#pragma once

#include "punica/tile.cuh"

namespace punica {

constexpr int kChunk = 32;  // K elements of one load of a quad of lanes

// Eight weight rows (output columns) of a lane, one chunk of K.
struct WeightChunk {
  Vec8 row[8];
};

// Loads the lane's chunk: `rows` rows exist from `base` on, `depth` elements from `base` on matter (both may be <= 0). With
// kWhole the rows are all there or none.
template <bool kWhole, typename T>
__device__ inline WeightChunk load_weights(T const* base, int pitch, int rows, int depth) {
  WeightChunk out;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    out.row[i] = load8<Source::kConstant, true>(base, (kWhole ? rows > 0 : i < rows) ? depth : 0);
    base += pitch;
  }
  if (depth > 0 && depth < 8) {
#pragma unroll
    for (int i = 0; i < 8; ++i) keep_first(out.row[i], depth);
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

// Row gain and bias of an adapter.
template <typename T>
struct Affine {
  T const* arena;
  int64_t gain_offset;  // -1: none
  int64_t bias_offset;

  // Applies both to eight columns from `column` on, `valid` of which exist.
  __device__ void apply(float (&out)[8], int column, int valid) const {
    if (gain_offset >= 0) {
      Vec8 const gain = load8<Source::kConstant, true>(arena + gain_offset + column, valid);
#pragma unroll
      for (int i = 0; i < 8; ++i) out[i] *= get<T>(gain, i);
    }
    if (bias_offset >= 0) {
      Vec8 const bias = load8<Source::kConstant, true>(arena + bias_offset + column, valid);
#pragma unroll
      for (int i = 0; i < 8; ++i) out[i] += get<T>(bias, i);
    }
  }
};

template <typename T, bool kAligned>
__device__ inline void store8(T* pointer, float const (&values)[8], int valid) {
  Vec8 out;
#pragma unroll
  for (int i = 0; i < 4; ++i) out.word[i] = Convert<T>::pack(values[2 * i], values[2 * i + 1]);
  if constexpr (kAligned) {
    if (valid > 0) *reinterpret_cast<uint4*>(pointer) = to_raw(out);
  } else {
    auto* const elements = reinterpret_cast<uint16_t*>(pointer);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < valid) elements[i] = static_cast<uint16_t>(out.word[i / 2] >> (i % 2 * 16));
  }
}

}  // namespace punica
