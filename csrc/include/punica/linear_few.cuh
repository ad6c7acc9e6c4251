// y = x W^T + b for at most eight rows: the weight streams through the multiprocessors once, and never stops.
//
// As in shrink, rows of the weight are the rows of the tensor core's tile and the rows of x its eight columns, and a lane's 16
// bytes of a row are its operand. The warps of a block share tiles of 16 or 32 rows: each takes every sixteenth chunk of 32
// columns. The loads run kDepth chunks ahead of the products, across tiles too. What is in front of this kernel only
// gives x, so the first weights are asked for before it has ended, and what follows them is brought into the L2 cache.
#pragma once

#include "punica/linear_params.h"
#include "punica/tile.cuh"

namespace punica {

constexpr int kLinearWarps = 16;
constexpr int kLinearThreads = 32 * kLinearWarps;
constexpr int kLinearChunk = 32;               // columns
constexpr int kLinearPrefetchBytes = 8 << 10;  // of each row of a block's first tile

// Chunks of one warp on their way to the tensor core.
template <int kTileRows, int kDepth>
struct LinearRing {
  Vec8 weight[kDepth][kTileRows / 8];  // rows g, g + 8, ..; columns 8 q ..
  Vec8 x[kDepth];                      // row g
};

// The kDepth chunks that a warp loads next, all of one tile.
struct LinearPlace {
  int tile;
  int chunk;  // of this warp, the first of them
};

// kWhole: chunks and tiles are all whole, and so are rings of chunks. Else addresses are kept within the weight, and x is zero
// where there are no columns; rows of the output that do not exist are not stored.
template <typename T, int kTileRows, int kDepth, bool kWhole>
struct LinearWork {
  static constexpr int kStride = kLinearWarps * kLinearChunk;  // columns from one chunk of a warp to its next

  LinearParams const& params;
  int chunks;  // of a warp and tile, rounded up to whole rings

  __device__ int column_of(int chunk) const {
    int const thread = threadIdx.x;
    return chunk * kStride + thread / 32 * kLinearChunk + thread % 4 * 8;
  }

  // The rows of a tile that this lane loads are eight apart.
  __device__ T const* weight_at(LinearPlace const& place, int index) const {
    int row = place.tile * kTileRows + static_cast<int>(threadIdx.x % 32) / 4 + 8 * index;
    if constexpr (!kWhole) row = min(row, params.out_features - 1);
    return static_cast<T const*>(params.weight) + static_cast<int64_t>(row) * params.in_features;
  }

  // Columns of rows that do not exist are computed and thrown away.
  __device__ T const* x_row() const {
    int const row = min(static_cast<int>(threadIdx.x % 32) / 4, params.num_rows - 1);
    return static_cast<T const*>(params.x) + row * params.x_stride;
  }

  __device__ int inside(int column) const { return kWhole ? column : min(column, params.in_features - 8); }

  __device__ void load_weight(Vec8 (&out)[kTileRows / 8], T const* const (&rows)[kTileRows / 8], int column) const {
#pragma unroll
    for (int i = 0; i < kTileRows / 8; ++i) out[i] = from_raw(load16<Source::kConstant>(rows[i] + inside(column)));
  }

  __device__ void load_x(Vec8& out, T const* row, int column) const {
    bool const exists = kWhole || column < params.in_features;
    out = exists ? from_raw(load16<Source::kActivation>(row + inside(column))) : zero8();
  }

  __device__ void advance(LinearPlace& place) const {
    place.chunk += kDepth;
    if (place.chunk < chunks) return;
    place.chunk = 0;
    place.tile += gridDim.x;
  }
};

template <int kTileRows>
using LinearSums = float[kLinearWarps][kTileRows][kLinearRows + 1];

// Adds up what the warps have of a tile.
template <typename T, int kTileRows>
__device__ inline void finish_tile(LinearParams const& params, LinearSums<kTileRows>& shared,
                                   float const (&sums)[kTileRows / 16][4], int tile) {
  int const lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kTileRows / 16; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) shared[threadIdx.x / 32][16 * i + j / 2 * 8 + lane / 4][lane % 4 * 2 + j % 2] = sums[i][j];
  __syncthreads();
  int const row = threadIdx.x / kTileRows;
  int const column = tile * kTileRows + threadIdx.x % kTileRows;
  if (row >= params.num_rows || column >= params.out_features) return;
  float sum = params.bias == nullptr ? 0.0f : Convert<T>::to_float(static_cast<T const*>(params.bias)[column]);
#pragma unroll
  for (int warp = 0; warp < kLinearWarps; ++warp) sum += shared[warp][threadIdx.x % kTileRows][row];
  static_cast<T*>(params.y)[row * params.y_stride + column] = static_cast<T>(sum);
}

template <typename T, int kTileRows, int kDepth, bool kWhole>
__global__ void __launch_bounds__(kLinearThreads, 1) linear_few_kernel(const __grid_constant__ LinearParams params) {
  static_assert(kTileRows * kLinearRows <= kLinearThreads);
  __shared__ LinearSums<kTileRows> shared[2];
  using Work = LinearWork<T, kTileRows, kDepth, kWhole>;
  int const all_chunks = (params.in_features + Work::kStride - 1) / Work::kStride;
  Work const work{params, round_up(all_chunks, kDepth)};
  int const tiles = (params.out_features + kTileRows - 1) / kTileRows;
  LinearRing<kTileRows, kDepth> ring;
  LinearPlace ahead{static_cast<int>(blockIdx.x), 0};
  T const* rows[kTileRows / 8];

#pragma unroll
  for (int i = 0; i < kTileRows / 8; ++i) rows[i] = work.weight_at(ahead, i);
#pragma unroll
  for (int slot = 0; slot < kDepth; ++slot) work.load_weight(ring.weight[slot], rows, work.column_of(slot));
  int const first_row = blockIdx.x * kTileRows + threadIdx.x;
  if (threadIdx.x < kTileRows && first_row < params.out_features) {
    int const row_bytes = params.in_features * static_cast<int>(sizeof(T));
    prefetch(static_cast<T const*>(params.weight) + static_cast<int64_t>(first_row) * params.in_features,
             min(row_bytes, kLinearPrefetchBytes));
  }
  wait_for_previous();
  start_next();  // compiled kernels behind this one rely on all that came before it having ended
  T const* const x_row = work.x_row();
#pragma unroll
  for (int slot = 0; slot < kDepth; ++slot) work.load_x(ring.x[slot], x_row, work.column_of(slot));
  work.advance(ahead);

  int parity = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, parity ^= 1) {
    float sums[kTileRows / 16][4] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < work.chunks; chunk += kDepth) {
      bool const has_next = ahead.tile < tiles;
#pragma unroll
      for (int i = 0; i < kTileRows / 8; ++i) rows[i] = work.weight_at(ahead, i);
      int const column = work.column_of(ahead.chunk);
#pragma unroll
      for (int slot = 0; slot < kDepth; ++slot) {
#pragma unroll
        for (int i = 0; i < kTileRows / 16; ++i)
          mma_16x8x32<T>(sums[i], ring.weight[slot][2 * i], ring.weight[slot][2 * i + 1], ring.x[slot]);
        if (has_next) {
          work.load_weight(ring.weight[slot], rows, column + slot * Work::kStride);
          work.load_x(ring.x[slot], x_row, column + slot * Work::kStride);
        }
      }
      work.advance(ahead);
    }
    finish_tile<T, kTileRows>(params, shared[parity], sums, tile);
  }
}

// How evenly tiles of so many rows fill the multiprocessors: the share of them that has something to do, on average.
inline double linear_fill(int out_features, int tile_rows, int num_sms) {
  int const tiles = (out_features + tile_rows - 1) / tile_rows;
  int const rounds = (tiles + num_sms - 1) / num_sms;
  return static_cast<double>(tiles) / (static_cast<double>(rounds) * num_sms);
}

template <typename T, int kTileRows>
cudaError_t launch_linear_few_with(LinearParams const& params, LaunchConfig const& config) {
  constexpr int kDepth = 4;
  bool const whole = params.in_features % (kDepth * kLinearWarps * kLinearChunk) == 0 &&
                     params.out_features % kTileRows == 0;
  int const tiles = (params.out_features + kTileRows - 1) / kTileRows;
  return launch(whole ? linear_few_kernel<T, kTileRows, kDepth, true> : linear_few_kernel<T, kTileRows, kDepth, false>,
                tiles < config.num_sms ? tiles : config.num_sms, kLinearThreads, params, config);
}

template <typename T>
cudaError_t launch_linear_few(LinearParams const& params, LaunchConfig const& config) {
  if (params.num_rows == 0 || params.out_features == 0) return cudaSuccess;
  constexpr double kWorth = 0.05;  // taller tiles read x half as often
  bool const tall = linear_fill(params.out_features, 32, config.num_sms) + kWorth >=
                    linear_fill(params.out_features, 16, config.num_sms);
  return tall ? launch_linear_few_with<T, 32>(params, config) : launch_linear_few_with<T, 16>(params, config);
}

}  // namespace punica
