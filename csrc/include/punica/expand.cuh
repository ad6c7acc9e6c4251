// y = gain * (y + scale * v B^T) + bias: the low-rank rows of a step onto the whole fused output of a group.
//
// The plan lists shares of tiles (at most 64 rows of one segment): a tile that moves more bytes a column has more shares, each
// of them a range of output columns. The kernel cuts every share into the same number of items. For each item the block
// sums the splits that shrink left into shared memory, in a fixed order; each warp then streams weights through two
// register buffers. The first weights are on their way before the block waits for shrink.
#pragma once

#include "punica/expand_decode.cuh"
#include "punica/expand_items.cuh"
#include "punica/expand_prompt.cuh"

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
  part.log2_pack = part.lora_rank <= 16 ? 1 : 0;
  part.pitch = round_up(part.lora_rank, kRowAlignment);
  part.scale = item.record.scale;
  part.b = static_cast<T const*>(params.tables.arena) + item.record.b_offset + Part<T>::lane_column() * part.pitch +
           part.lane_k();
  part.y = static_cast<T*>(params.y) + (item.tile.x + static_cast<int>(threadIdx.x) % 4 * 2) * params.y_stride +
           params.columns[item.slice] + Part<T>::lane_column();
  return part;
}

// The part of an item that lies in one slice.
template <typename T, bool kPrompt, int kBlocksPerSm, bool kAligned>
__device__ inline void expand_slice(ExpandParams const& params, ExpandItem const& item, int splits, int rank_pitch,
                                    T* hidden, bool& must_wait) {
  if (item.record.lora_rank == 0) return;
  Scratch const& scratch = params.scratch;
  int const row_pitch = params.tables.slices * rank_pitch;
  Part<T> const part = make_part<T>(params, item);
  Affine<T> const affine{static_cast<T const*>(params.tables.arena), item.record.gain_offset, item.record.bias_offset};
  HiddenSource const source{scratch.v + static_cast<int64_t>(item.tile.x) * row_pitch + item.slice * rank_pitch,
                            row_pitch, static_cast<int64_t>(scratch.num_rows) * row_pitch, splits};
  if constexpr (kPrompt) {
    expand_prompt_part<T, kAligned>(part, affine, source, params.y_stride, hidden, must_wait);
  } else {
    expand_decode_part<T, kBlocksPerSm == 2 ? 8 : 4, kAligned>(part, affine, source, params.y_stride, hidden, must_wait);
  }
}

// kBlocksPerSm: fewer blocks have more registers, which is faster until there is enough work to stream.
template <typename T, bool kPrompt, int kBlocksPerSm, bool kAligned>
__global__ void __launch_bounds__(kExpandThreads, kBlocksPerSm)
    expand_kernel(const __grid_constant__ ExpandParams params) {
  __shared__ __align__(16) T hidden[kMaxTileRows * kHiddenPitch];
  start_next();
  int32_t const* const plan = params.tables.plan;
  WorkList const work = load_work_list(plan);
  Cut const cut = make_cut(params, work.num_shares);
  int const num_items = work.num_shares * cut.items_a_share;
  int const stride = gridDim.x;
  auto const load_tile = [&](int index) {
    return load_item(plan, work.shares_offset, min(index, num_items - 1) / cut.items_a_share);
  };
  bool must_wait = true;
  if (blockIdx.x < num_items) {
    int4 tile = load_tile(blockIdx.x);
    int const splits = split_count(params.scratch, work.num_units, params.tables.slices, params.in_features);
    for (int index = blockIdx.x; index < num_items; index += stride) {
      ExpandItem item = make_item(params, cut, tile, index);
      tile = load_tile(index + stride);
      expand_slice<T, kPrompt, kBlocksPerSm, kAligned>(params, item, splits, work.rank_pitch, hidden, must_wait);
      while (params.unit_end[item.slice] < item.end_unit) {
        item.first_unit = params.unit_end[item.slice++];
        item.record = load_record(params.tables, item.slice, item.tile.z);
        expand_slice<T, kPrompt, kBlocksPerSm, kAligned>(params, item, splits, work.rank_pitch, hidden, must_wait);
      }
    }
  }
  if (must_wait) wait_for_previous();
}

template <typename T, bool kPrompt, int kBlocksPerSm>
cudaError_t launch_expand_kernel(ExpandParams const& params, LaunchConfig const& config) {
  bool aligned = params.y_stride % 8 == 0 && reinterpret_cast<uintptr_t>(params.y) % 16 == 0;
  for (int slice = 0; slice < params.tables.slices; ++slice) aligned = aligned && params.widths[slice] % 8 == 0;
  auto* const kernel = aligned ? expand_kernel<T, kPrompt, kBlocksPerSm, true> : expand_kernel<T, kPrompt, kBlocksPerSm, false>;
  return launch(kernel, config.num_sms * kBlocksPerSm, kExpandThreads, params, config);
}

template <typename T>
cudaError_t launch_expand(ExpandParams const& params, LaunchConfig const& config) {
  if (params.scratch.num_rows > kMaxDecodeRows) return launch_expand_kernel<T, true, 3>(params, config);
  if (params.scratch.num_rows > kMaxFewRows) return launch_expand_kernel<T, false, 3>(params, config);
  return launch_expand_kernel<T, false, 2>(params, config);
}

}  // namespace punica
