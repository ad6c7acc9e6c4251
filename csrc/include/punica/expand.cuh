// y = gain * (y + scale * v B^T) + bias: the low-rank rows of a step onto the whole fused output of a group.
//
// The plan lists shares of tiles (at most 64 rows of one segment): a tile that moves more bytes a column has more shares, each
// of them a range of output columns. The kernel cuts every share into the same number of items. Each warp of an item's block streams
// weights and y through registers. The first weights are on their way before the block waits for shrink.
#pragma once

#include "punica/expand_part.cuh"
#include "punica/expand_walk.cuh"
#include "punica/expand_write.cuh"

namespace punica {

constexpr int kExpandBlocksPerSm = 2;  // three would have no registers for weights of lora_rank 64 on their way

template <typename T>
__device__ inline Affine<T> affine_of(ExpandParams const& params, TableRecord const& record) {
  return {static_cast<T const*>(params.tables.arena), record.gain_offset, record.bias_offset};
}

template <typename T, bool kAligned, bool kSummed>
__global__ void __launch_bounds__(kExpandThreads, kExpandBlocksPerSm) expand_kernel(const __grid_constant__ ExpandParams params) {
  __shared__ Staged staged;
  start_next();
  bool must_wait = true;
  for_each_part<kExpandWarps, false>(params, [&](ExpandItem const& item, WorkList const& work) {
    Part<T> const part = make_part<T>(params, item);
    expand_part<T, kAligned, kSummed>(part, affine_of<T>(params, item.record), hidden_of<T>(params, item, work), params.y_stride, staged, must_wait);
  });
  if (must_wait) wait_for_previous();
}

template <typename T>
cudaError_t launch_expand(ExpandParams const& params, LaunchConfig const& config) {
  bool aligned = params.y_stride % 8 == 0 && reinterpret_cast<uintptr_t>(params.y) % 16 == 0;
  for (int slice = 0; slice < params.tables.slices; ++slice) aligned = aligned && params.widths[slice] % 8 == 0;
  if (params.overwrite) {
    auto* const kernel = aligned ? write_kernel<T, true> : write_kernel<T, false>;
    return launch(kernel, config.num_sms * kWriteBlocksPerSm, kWriteThreads, params, config);
  }
  bool const summed = params.scratch.summed;
  auto* const kernel = aligned ? (summed ? expand_kernel<T, true, true> : expand_kernel<T, true, false>)
                               : (summed ? expand_kernel<T, false, true> : expand_kernel<T, false, false>);
  return launch(kernel, config.num_sms * kExpandBlocksPerSm, kExpandThreads, params, config);
}

}  // namespace punica
