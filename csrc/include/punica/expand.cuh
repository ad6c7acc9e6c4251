// y = gain * (y + scale * v B^T) + bias: the low-rank rows of a step onto the whole fused output of a group.
//
// One work item is (tile, chunk): at most 64 rows of one segment by 256 output columns of one slice. The block first sums the
// splits that shrink left into shared memory, in a fixed order. The first weights are on their way before it waits for
// shrink.
#pragma once

#include "punica/columns.cuh"

namespace punica {

constexpr int kExpandWarps = kExpandColumns / kWarpColumns;
constexpr int kExpandThreads = 32 * kExpandWarps;
constexpr int kExpandBlocksPerSm = 3;
constexpr int kHiddenPitch = kMaxRank + 8;  // of the shared low-rank rows: without bank conflicts

template <typename T>
struct ExpandItem {
  int row_start;
  int row_count;
  int slice;
  int column;    // of the warp's tile, within the slice
  int width;     // of the slice
  int y_column;  // first column of the slice
  int splits;
  int chunks;  // of K, at least 1
  TableRecord record;
  WeightRows<T> weights;
};

// Sums the splits of v for the item's rows into `hidden` [rows, kHiddenPitch], rounded to T; zero beyond lora_rank and up to
// `num_rows` rows.
template <typename T>
__device__ inline void gather_hidden(T* hidden, ExpandParams const& params, ExpandItem<T> const& item, int num_rows) {
  Scratch const& scratch = params.scratch;
  int const quads = item.chunks * (kChunk / 4);
  int64_t const row_pitch = static_cast<int64_t>(params.tables.slices) * scratch.max_rank;
  int64_t const split_pitch = scratch.num_rows * row_pitch;
  for (int index = threadIdx.x; index < num_rows * quads; index += kExpandThreads) {
    int const t = index / quads;
    int const r = index % quads * 4;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    if (t < item.row_count && r < item.record.lora_rank) {
      float const* const v = scratch.v + (item.row_start + t) * row_pitch + item.slice * scratch.max_rank + r;
#pragma unroll 4
      for (int split = 0; split < item.splits; ++split) {
        float4 const part = __ldcg(reinterpret_cast<float4 const*>(v + split * split_pitch));
        sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
      }
    }
    int const left = item.record.lora_rank - r;  // the ranks of a last, partial quad were never written
    union {
      T element[4];
      uint2 raw;
    } out = {{Convert<T>::from_float(sum.x), Convert<T>::from_float(left > 1 ? sum.y : 0.f),
              Convert<T>::from_float(left > 2 ? sum.z : 0.f), Convert<T>::from_float(left > 3 ? sum.w : 0.f)}};
    *reinterpret_cast<uint2*>(hidden + t * kHiddenPitch + r) = out.raw;
  }
}

template <typename T, int kRowTiles, bool kAligned>
__device__ inline void load_output(Vec8 (&y)[kRowTiles][2], ExpandParams const& params, ExpandItem<T> const& item, int first_row) {
  int const lane = threadIdx.x % 32;
  int const column = item.column + lane / 4 * 8;
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      int const t = first_row + n * 8 + lane % 4 * 2 + side;
      T const* const from = static_cast<T const*>(params.y) + (item.row_start + t) * params.y_stride +
                            item.y_column + column;
      y[n][side] = load8<Source::kActivation, kAligned>(from, t < item.row_count ? item.width - column : 0);
    }
}

template <typename T, int kRowTiles, bool kAligned>
__device__ inline void store_output(float const (&acc)[4][kRowTiles][4], Vec8 const (&y)[kRowTiles][2],
                                    ExpandParams const& params, ExpandItem<T> const& item, int first_row) {
  int const lane = threadIdx.x % 32;
  int const column = item.column + lane / 4 * 8;
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      int const t = first_row + n * 8 + lane % 4 * 2 + side;
      int const valid = item.width - column;
      if (t >= item.row_count || valid <= 0) continue;
      float out[8];
      columns_of<kRowTiles>(out, acc, n, side);
#pragma unroll
      for (int i = 0; i < 8; ++i) out[i] = get<T>(y[n][side], i) + item.record.scale * out[i];
      apply_affine(out, static_cast<T const*>(params.tables.arena), item.record, column, valid);
      T* const to = static_cast<T*>(params.y) + (item.row_start + t) * params.y_stride + item.y_column + column;
      store8<T, kAligned>(to, out, valid);
    }
}

template <typename T, int kRowTiles>
__device__ inline void load_hidden(Vec8 (&rows)[kRowTiles], T const* hidden, int first_row, int chunk) {
  int const lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n)
    rows[n].raw = *reinterpret_cast<uint4 const*>(hidden + (first_row + n * 8 + lane / 4) * kHiddenPitch + chunk * kChunk +
                                                  lane % 4 * 8);
}

// `first` and `second` hold the weights of chunks 0 and 1. With more chunks they are reloaded while the other is in use,
// and hold chunks 0 and 1 again at the end of each row group.
template <typename T, int kRowTiles, bool kAligned>
__device__ inline void expand_rows(ExpandParams const& params, ExpandItem<T> const& item, WeightChunk& first,
                                   WeightChunk& second, T const* hidden) {
  Vec8 y[kRowTiles][2];
  load_output<T, kRowTiles, kAligned>(y, params, item, 0);
  int const pairs = (item.chunks + 1) / 2;
  for (int row = 0; row < item.row_count; row += 8 * kRowTiles) {
    float acc[4][kRowTiles][4] = {};
    for (int pair = 0; pair < pairs; ++pair) {
      int const next = pair + 1 < pairs ? pair + 1 : 0;
      Vec8 rows[kRowTiles];
      load_hidden<T, kRowTiles>(rows, hidden, row, 2 * pair);
      multiply<T, kRowTiles>(acc, first, rows);
      if (pairs > 1) first = load_weights(item.weights, 2 * next);
      if (2 * pair + 1 < item.chunks) {
        load_hidden<T, kRowTiles>(rows, hidden, row, 2 * pair + 1);
        multiply<T, kRowTiles>(acc, second, rows);
      }
      if (pairs > 1) second = load_weights(item.weights, 2 * next + 1);
    }
    Vec8 y_next[kRowTiles][2];
    load_output<T, kRowTiles, kAligned>(y_next, params, item, row + 8 * kRowTiles);
    store_output<T, kRowTiles, kAligned>(acc, y, params, item, row);
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) y[n][0] = y_next[n][0], y[n][1] = y_next[n][1];
  }
}

template <typename T>
__device__ inline ExpandItem<T> make_expand_item(ExpandParams const& params, int4 tile, int chunk) {
  ExpandItem<T> item;
  item.row_start = tile.x;
  item.row_count = tile.y;
  item.slice = 0;
  while (chunk >= params.chunk_end[item.slice]) ++item.slice;
  int const first_chunk = item.slice > 0 ? params.chunk_end[item.slice - 1] : 0;
  item.column = (chunk - first_chunk) * kExpandColumns + threadIdx.x / 32 * kWarpColumns;
  item.width = params.widths[item.slice];
  item.y_column = params.columns[item.slice];
  item.record = load_record(params.tables, item.slice, tile.z);
  item.chunks = (item.record.lora_rank + kChunk - 1) / kChunk;
  item.weights = weight_rows(static_cast<T const*>(params.tables.arena) + item.record.b_offset, item.column,
                             item.width, round_up(item.record.lora_rank, kRowAlignment),
                             item.record.lora_rank);
  return item;
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kExpandThreads, kExpandBlocksPerSm) expand_kernel(const __grid_constant__ ExpandParams params) {
  __shared__ __align__(16) T hidden[kMaxTileRows * kHiddenPitch];
  start_next();
  int32_t const* const plan = params.tables.plan;
  int const offset = __ldg(plan + kExpandOffset);
  int const num_units = __ldg(plan + kNumShrinkUnits);
  int const num_chunks = params.chunk_end[params.tables.slices - 1];
  int const num_items = __ldg(plan + kNumExpandTiles) * num_chunks;
  bool waited = false;
  for (int index = blockIdx.x; index < num_items; index += gridDim.x) {
    ExpandItem<T> item = make_expand_item<T>(params, load_item(plan, offset, index / num_chunks), index % num_chunks);
    if (item.record.lora_rank == 0) continue;
    item.splits = split_count(params.scratch, num_units, params.tables.slices, params.in_features);
    WeightChunk first = load_weights(item.weights, 0);
    WeightChunk second = load_weights(item.weights, 1);
    if (!waited) wait_for_previous();
    waited = true;
    int const height = item.row_count <= 8 ? 8 : 16;
    __syncthreads();  // the item before has been read
    gather_hidden(hidden, params, item, round_up(item.row_count, height));
    __syncthreads();
    if (height == 8) {
      expand_rows<T, 1, kAligned>(params, item, first, second, hidden);
    } else {
      expand_rows<T, 2, kAligned>(params, item, first, second, hidden);
    }
  }
}

template <typename T>
cudaError_t launch_expand(ExpandParams const& params, LaunchConfig const& config) {
  bool aligned = params.y_stride % 8 == 0 && reinterpret_cast<uintptr_t>(params.y) % 16 == 0;
  for (int slice = 0; slice < params.tables.slices; ++slice) aligned = aligned && params.widths[slice] % 8 == 0;
  auto* const kernel = aligned ? expand_kernel<T, true> : expand_kernel<T, false>;
  return launch(kernel, config.num_sms * kExpandBlocksPerSm, kExpandThreads, params, config);
}

}  // namespace punica
