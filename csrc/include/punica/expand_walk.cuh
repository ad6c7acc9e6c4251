// A block's way through the items of lora_expand.
#pragma once

#include "punica/expand_items.cuh"
#include "punica/part.cuh"

namespace punica {

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

// What a warp needs again when it has done a part: kept in shared memory, as the registers are wanted for weights.
struct Walk {
  WorkList work;
  Cut cut;
};

// Calls visit(item, work) for the part of each of the block's items that lies in one slice, if that has a lora_rank or kAll is set. There is one
// place where `visit` is called, so that its instructions exist once.
template <int kWarps, bool kAll, typename Visit>
__device__ inline void for_each_part(ExpandParams const& params, Visit visit) {
  __shared__ Walk all_kept[kWarps];
  Walk& kept = all_kept[threadIdx.x / 32];
  WorkList const first = load_work_list(params.tables, params.scratch);
  Walk walk{first, make_cut<kWarps>(params, first)};
  if (threadIdx.x % 32 == 0) kept = walk;
  __syncwarp();
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

template <typename T>
__device__ inline Hidden<T> hidden_of(ExpandParams const& params, ExpandItem const& item, WorkList const& work) {
  Scratch const& scratch = params.scratch;
  int const pitch = params.tables.slices * work.rank_pitch;
  int64_t const first = static_cast<int64_t>(item.tile.x) * pitch + item.slice * work.rank_pitch;
  int const splits = scratch.summed ? 0 : split_count(scratch, work.num_units, params.tables.slices, params.in_features);
  return {static_cast<T const*>(scratch.hidden) + first, scratch.parts + first, pitch, static_cast<int64_t>(scratch.num_rows) * pitch, splits};
}

}  // namespace punica
