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

// Which chunk of which tile a warp loads next.
struct LinearPlace {
  int tile;
  int chunk;  // of this warp
};

template <typename T, int kTileRows, int kDepth>
struct LinearWork {
  LinearParams const& params;
  int chunks;  // of a warp and tile, rounded up to the depth of the ring
  int lane = threadIdx.x % 32;
  int warp = threadIdx.x / 32;

  __device__ int column_of(int chunk) const { return (chunk * kLinearWarps + warp) * kLinearChunk + lane % 4 * 8; }

  __device__ void load_weight(Vec8 (&out)[kTileRows / 8], LinearPlace const& place) const {
    int const column = column_of(place.chunk);
#pragma unroll
    for (int i = 0; i < kTileRows / 8; ++i) {
      int const row = place.tile * kTileRows + lane / 4 + 8 * i;
      bool const exists = column < params.in_features && row < params.out_features;
      T const* const source =
          static_cast<T const*>(params.weight) + static_cast<int64_t>(row) * params.in_features + column;
      out[i] = exists ? from_raw(load16<Source::kConstant>(source)) : zero8();
    }
  }

  __device__ void load_x(Vec8& out, LinearPlace const& place) const {
    int const column = column_of(place.chunk);
    bool const exists = column < params.in_features && lane / 4 < params.num_rows;
    T const* const source = static_cast<T const*>(params.x) + lane / 4 * params.x_stride + column;
    out = exists ? from_raw(load16<Source::kActivation>(source)) : zero8();
  }

  __device__ void advance(LinearPlace& place) const {
    if (++place.chunk < chunks) return;
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

template <typename T, int kTileRows, int kDepth>
__global__ void __launch_bounds__(kLinearThreads, 1) linear_few_kernel(const __grid_constant__ LinearParams params) {
  static_assert(kTileRows * kLinearRows <= kLinearThreads);
  __shared__ LinearSums<kTileRows> shared[2];
  int const all_chunks = (params.in_features + kLinearChunk - 1) / kLinearChunk;
  int const chunks = round_up((all_chunks + kLinearWarps - 1) / kLinearWarps, kDepth);
  int const tiles = (params.out_features + kTileRows - 1) / kTileRows;
  LinearWork<T, kTileRows, kDepth> const work{params, chunks};
  LinearRing<kTileRows, kDepth> ring;
  LinearPlace ahead{static_cast<int>(blockIdx.x), 0};
#pragma unroll
  for (int slot = 0; slot < kDepth; ++slot) {
    work.load_weight(ring.weight[slot], ahead);
    work.advance(ahead);
  }
  int const first_row = blockIdx.x * kTileRows + threadIdx.x;
  if (threadIdx.x < kTileRows && first_row < params.out_features) {
    int const row_bytes = params.in_features * static_cast<int>(sizeof(T));
    prefetch(static_cast<T const*>(params.weight) + static_cast<int64_t>(first_row) * params.in_features,
             min(row_bytes, kLinearPrefetchBytes));
  }
  wait_for_previous();
  start_next();  // compiled kernels behind this one rely on all that came before it having ended
  ahead = {static_cast<int>(blockIdx.x), 0};
#pragma unroll
  for (int slot = 0; slot < kDepth; ++slot) {
    work.load_x(ring.x[slot], ahead);
    work.advance(ahead);
  }
  int parity = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, parity ^= 1) {
    float sums[kTileRows / 16][4] = {};
    for (int chunk = 0; chunk < chunks; chunk += kDepth) {
#pragma unroll
      for (int slot = 0; slot < kDepth; ++slot) {
#pragma unroll
        for (int i = 0; i < kTileRows / 16; ++i)
          mma_16x8x32<T>(sums[i], ring.weight[slot][2 * i], ring.weight[slot][2 * i + 1], ring.x[slot]);
        work.load_weight(ring.weight[slot], ahead);
        work.load_x(ring.x[slot], ahead);
        work.advance(ahead);
      }
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

template <typename T>
cudaError_t launch_linear_few(LinearParams const& params, LaunchConfig const& config) {
  if (params.num_rows == 0 || params.out_features == 0) return cudaSuccess;
  constexpr double kWorth = 0.05;  // taller tiles read x half as often
  bool const tall = linear_fill(params.out_features, 32, config.num_sms) + kWorth >=
                    linear_fill(params.out_features, 16, config.num_sms);
  int const tile_rows = tall ? 32 : 16;
  int const tiles = (params.out_features + tile_rows - 1) / tile_rows;
  return launch(tall ? linear_few_kernel<T, 32, 4> : linear_few_kernel<T, 16, 4>, min(tiles, config.num_sms),
                kLinearThreads, params, config);
}

}  // namespace punica
