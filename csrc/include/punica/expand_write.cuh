// y = scale * v B^T, and zero where there is none: lora_expand for steps of many rows, before the base product, which is added to y.
//
// y is not read, so what counts is that writes do not wait. A warp has 32 columns of all rows of the tile at a time: what it loads of B serves
// 64 rows, and the next 32 columns are on their way meanwhile.
#pragma once

#include "punica/expand_part.cuh"
#include "punica/expand_walk.cuh"

namespace punica {

constexpr int kWriteWarps = 8;
constexpr int kWriteThreads = 32 * kWriteWarps;
constexpr int kWriteBlocksPerSm = 2;
constexpr int kWriteStep = kWriteWarps * kRunColumns;  // columns from one run of a warp to the next

// Where a lane's sums go: eight columns of two rows of each row tile.
template <typename T, bool kAligned>
struct TileOutput {
  T* y;  // in row g of the tile, run 0
  int64_t stride;
  int rows;  // from row g on
  int left;  // columns from there on
  float scale;

  __device__ TileOutput(Part<T> const& part, int64_t y_stride, int first_column, int end_column)
      : y(part.y + threadIdx.x % 32 / 4 * y_stride + first_column + threadIdx.x % 4 * 8),
        stride(y_stride),
        rows(part.row_count - static_cast<int>(threadIdx.x % 32 / 4)),
        left(end_column - first_column - static_cast<int>(threadIdx.x % 4 * 8)),
        scale(part.scale) {}

  __device__ void advance() {
    y += kWriteStep;
    left -= kWriteStep;
  }

  __device__ void store(RunSums const& sums, int tile) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const row = tile * kWarpRows + half * 8;
      if (row >= rows || left <= 0) continue;
      float out[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) out[i] = scale * sums.d[i / 2][half * 2 + i % 2];
      store8<T, kAligned>(y + row * stride, out, left);
    }
  }
};

// A warp's runs where the weights of a run fit the registers: kChunks of K, kAhead runs on their way.
template <int kChunks, int kAhead, typename T, bool kAligned>
__device__ inline void write_runs(Part<T> const& part, WeightStream<T, kAligned>& stream, TileOutput<T, kAligned>& output, Staged const& staged,
                                  int left, RunWeights (&weights)[2]) {
#pragma unroll 1
  while (true) {
#pragma unroll
    for (int run = 0; run < kAhead; ++run) {
#pragma unroll 2
      for (int tile = 0; tile * kWarpRows < part.row_count; ++tile) {
        RunSums sums;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk)
          multiply_rows<T>(sums, staged.rows(kChunks, tile, chunk), weights[run * kChunks + chunk]);
        output.store(sums, tile);
      }
      left -= kWriteStep;
      if (left <= 0) return;
      output.advance();
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) stream.template load<false>(weights[run * kChunks + chunk], kAhead * kWriteStep, chunk);
      stream.column += kWriteStep;
    }
  }
}

// Any lora_rank: two row tiles at once, chunk by chunk.
template <typename T, bool kAligned>
__device__ inline void write_deep_runs(Part<T> const& part, WeightStream<T, kAligned>& stream, TileOutput<T, kAligned>& output, Staged const& staged,
                                       int left) {
#pragma unroll 1
  for (; left > 0; left -= kWriteStep) {
#pragma unroll 1
    for (int tile = 0; tile * kWarpRows < part.row_count; tile += 2) {
      RunSums sums[2];
#pragma unroll 1
      for (int chunk = 0; chunk < part.chunks; ++chunk) {
        RunWeights weights;
        stream.template load<true>(weights, 0, chunk);
#pragma unroll
        for (int i = 0; i < 2; ++i) multiply_rows<T>(sums[i], staged.rows(part.chunks, tile + i, chunk), weights);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) output.store(sums[i], tile + i);
    }
    stream.column += kWriteStep;
    output.advance();
  }
}

template <typename T, bool kAligned>
__device__ inline void write_part(Part<T> const& part, Hidden<T> const& hidden, int64_t y_stride, Staged& staged, bool& must_wait) {
  int const first_column = part.first_unit * kWarpColumns + static_cast<int>(threadIdx.x) / 32 * kRunColumns;
  int const end_column = min(part.width, part.end_unit * kWarpColumns);
  WeightStream<T, kAligned> stream(part, first_column, end_column);
  TileOutput<T, kAligned> output(part, y_stride, first_column, end_column);
  bool const whole = part.lora_rank % 8 == 0;
  RunWeights weights[2];
  if (whole && part.chunks == 1) {
    stream.template load<false>(weights[0], 0, 0);
    stream.template load<false>(weights[1], kWriteStep, 0);
  } else if (whole && part.chunks == 2) {
    stream.template load<false>(weights[0], 0, 0);
    stream.template load<false>(weights[1], 0, 1);
  }
  if (must_wait) wait_for_previous();
  must_wait = false;
  __syncthreads();  // the part before has been read
  staged.fill<kWriteThreads>(hidden, part);
  __syncthreads();
  int const left = end_column - first_column;
  if (left <= 0) return;
  if (whole && part.chunks == 1) {
    write_runs<1, 2>(part, stream, output, staged, left, weights);
  } else if (whole && part.chunks == 2) {
    write_runs<2, 1>(part, stream, output, staged, left, weights);
  } else {
    write_deep_runs(part, stream, output, staged, left);
  }
}

// Zeroes rows of y from `y` on, `columns` elements each.
template <typename T, bool kAligned>
__device__ inline void blank_rows(T* y, int64_t y_stride, int rows, int columns) {
  int const vectors = (columns + 7) / 8;
  float const zeros[8] = {};
  for (int row = 0; row < rows; ++row)
    for (int i = threadIdx.x; i < vectors; i += kWriteThreads) store8<T, kAligned>(y + row * y_stride + i * 8, zeros, columns - i * 8);
}

// Zeroes the rows of tiles without lora_rank, a few rows a block.
template <typename T, bool kAligned>
__device__ inline void blank_tiles(ExpandParams const& params) {
  constexpr int kRows = 4;
  constexpr int kPieces = kMaxTileRows / kRows;
  int4 const words = load_metadata(reinterpret_cast<int4 const*>(params.tables.plan + kLeastShares));
  int const num_columns = params.columns[params.tables.slices - 1] + params.widths[params.tables.slices - 1];
  for (int index = blockIdx.x; index < words.z * kPieces; index += gridDim.x) {
    int4 const tile = load_item(params.tables.plan, words.w, index / kPieces);
    int const first = index % kPieces * kRows;
    T* const y = static_cast<T*>(params.y) + (tile.x + first) * params.y_stride;
    blank_rows<T, kAligned>(y, params.y_stride, min(kRows, tile.y - first), num_columns);
  }
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kWriteThreads, kWriteBlocksPerSm) write_kernel(const __grid_constant__ ExpandParams params) {
  __shared__ Staged staged;
  start_next();
  bool must_wait = true;
  for_each_part<kWriteWarps, true>(params, [&](ExpandItem const& item, WorkList const& work) {
    Part<T> part = make_part<T>(params, item);
    part.log2_pack = 0;
    if (part.lora_rank > 0) {
      write_part<T, kAligned>(part, hidden_of<T>(params, item, work), params.y_stride, staged, must_wait);
      return;
    }
    if (must_wait) wait_for_previous();
    must_wait = false;
    int const first_column = part.first_unit * kWarpColumns;
    blank_rows<T, kAligned>(part.y + first_column, params.y_stride, part.row_count, min(part.width, part.end_unit * kWarpColumns) - first_column);
  });
  if (must_wait) wait_for_previous();
  blank_tiles<T, kAligned>(params);
}

}  // namespace punica
