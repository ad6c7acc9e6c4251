// y = gain * (y + scale * v B^T) + bias, or y = scale * v B^T and zero elsewhere: the low-rank rows of a step onto the whole fused output of
// a group.
//
// The plan lists shares of tiles (at most 64 rows of one segment): a tile that moves more bytes a column has more shares, each
// of them a range of output columns. The kernel cuts every share into the same number of items. For each item the block
// sums the splits that shrink left into shared memory, in a fixed order; each warp then streams weights and y through
// registers. The first weights are on their way before the block waits for shrink.
#pragma once

#include "punica/expand_items.cuh"
#include "punica/expand_part.cuh"

namespace punica {

constexpr int kExpandBlocksPerSm = 2;  // three would have no registers for weights of lora_rank 64 on their way

template <typename T>
__device__ inline Part<T> make_part(ExpandParams const& params, ExpandItem const& item) {
  int const start = item.slice > 0 ? params.unit_end[item.slice - 1] : 0;
  Part<T> part;
  part.row_count = item.tile.y;
  part.lora_rank = item.record.lora_rank;
  part.width = params.widths[item.slice];
  part.first_unit = item.first_unit - start;
  part.end_unit = min(item.end_unit, params.unit_end[item.slice]) - start;
  part.chunks = (part.lora_rank + kChunk - 1) / kChunk;
  part.log2_pack = log2_pack_of(part.row_count, part.lora_rank);
  part.pitch = round_up(part.lora_rank, kRowAlignment);
  part.scale = item.record.scale;
  part.b = static_cast<T const*>(params.tables.arena) + item.record.b_offset;
  part.y = static_cast<T*>(params.y) + item.tile.x * params.y_stride + params.columns[item.slice];
  return part;
}

// What a block needs again when it has done a part: kept in shared memory, as the registers are wanted for weights.
struct Walk {
  WorkList work;
  Cut cut;
};

// Calls visit(item, work) for the part of each of the block's items that lies in one slice, if that has a lora_rank or kAll is set. There is one
// place where `visit` is called, so that its instructions exist once. It must have a barrier.
template <bool kAll, typename Visit>
__device__ inline void for_each_part(ExpandParams const& params, Visit visit) {
  __shared__ Walk kept;
  WorkList const first = load_work_list(params.tables.plan);
  Walk walk{first, make_cut(params, first)};
  if (threadIdx.x == 0) kept = walk;
  int slice = 0;
#pragma unroll 1
  for (int index = blockIdx.x; index < walk.work.num_shares * walk.cut.items_a_share;) {
    ExpandItem const item = make_item(params, walk.work, walk.cut, index, slice);
    bool const more = params.unit_end[item.slice] < item.end_unit;
    slice = more ? item.slice + 1 : 0;
    if (!more) index += gridDim.x;
    if (item.first_unit >= item.end_unit || (!kAll && item.record.lora_rank == 0)) continue;
    visit(item, walk.work);
    walk = kept;
  }
}

__device__ inline HiddenSource hidden_source(ExpandParams const& params, ExpandItem const& item, WorkList const& work) {
  Scratch const& scratch = params.scratch;
  int const splits = split_count(scratch, work.num_units, params.tables.slices, params.in_features);
  int const row_pitch = params.tables.slices * work.rank_pitch;
  float const* const v = scratch.v + static_cast<int64_t>(item.tile.x) * row_pitch + item.slice * work.rank_pitch;
  return {v, row_pitch, static_cast<int64_t>(scratch.num_rows) * row_pitch, splits};
}

template <typename T>
__device__ inline Affine<T> affine_of(ExpandParams const& params, TableRecord const& record) {
  return {static_cast<T const*>(params.tables.arena), record.gain_offset, record.bias_offset};
}

// Zeroes rows of y from `y` on, `columns` elements each.
template <typename T, bool kAligned>
__device__ inline void blank_rows(T* y, int64_t y_stride, int rows, int columns) {
  int const vectors = (columns + 7) / 8;
  float const zeros[8] = {};
  for (int row = 0; row < rows; ++row)
    for (int i = threadIdx.x; i < vectors; i += kExpandThreads) store8<T, kAligned>(y + row * y_stride + i * 8, zeros, columns - i * 8);
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

template <typename T, bool kAligned, bool kOverwrite>
__global__ void __launch_bounds__(kExpandThreads, kExpandBlocksPerSm) expand_kernel(const __grid_constant__ ExpandParams params) {
  __shared__ __align__(16) T hidden[kMaxTileRows * kHiddenPitch];
  start_next();
  bool must_wait = true;
  for_each_part<kOverwrite>(params, [&](ExpandItem const& item, WorkList const& work) {
    Part<T> const part = make_part<T>(params, item);
    if (kOverwrite && part.lora_rank == 0) {
      if (must_wait) wait_for_previous();
      must_wait = false;
      int const first_column = part.first_unit * kWarpColumns;
      blank_rows<T, kAligned>(part.y + first_column, params.y_stride, part.row_count, min(part.width, part.end_unit * kWarpColumns) - first_column);
      __syncthreads();
      return;
    }
    auto const source = [&] { return hidden_source(params, item, work); };
    expand_part<T, kAligned, kOverwrite>(part, affine_of<T>(params, item.record), source, params.y_stride, hidden, must_wait);
  });
  if (must_wait) wait_for_previous();
  if constexpr (kOverwrite) blank_tiles<T, kAligned>(params);
}

template <typename T>
cudaError_t launch_expand(ExpandParams const& params, LaunchConfig const& config) {
  bool aligned = params.y_stride % 8 == 0 && reinterpret_cast<uintptr_t>(params.y) % 16 == 0;
  for (int slice = 0; slice < params.tables.slices; ++slice) aligned = aligned && params.widths[slice] % 8 == 0;
  auto* const kernel = params.overwrite ? (aligned ? expand_kernel<T, true, true> : expand_kernel<T, false, true>)
                                        : (aligned ? expand_kernel<T, true, false> : expand_kernel<T, false, false>);
  return launch(kernel, config.num_sms * kExpandBlocksPerSm, kExpandThreads, params, config);
}

}  // namespace punica
