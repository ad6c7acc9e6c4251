// v = A[token id]: the low-rank row of each token of an adapted segment.
#pragma once

#include "punica/tile.cuh"

namespace punica {

constexpr int kEmbedThreads = 128;
constexpr int kEmbedBlocksPerSm = 4;

template <typename T>
__global__ void __launch_bounds__(kEmbedThreads) embed_kernel(const __grid_constant__ EmbedParams params) {
  start_next();
  wait_for_previous();
  Tables const& tables = params.tables;
  WorkList const work = load_work_list(tables, params.scratch);
  for (int index = blockIdx.x; index < work.num_shares; index += gridDim.x) {
    int4 const tile = load_item(tables.plan, work.shares_offset, index);
    if ((tile.w & 0xffff) != 0) continue;  // once a tile
    TableRecord const record = load_record(tables, 0, tile.z);
    T const* const a = static_cast<T const*>(tables.arena) + record.a_offset;
    int const pitch = round_up(record.lora_rank, kRowAlignment);
    for (int i = threadIdx.x; i < tile.y * pitch; i += kEmbedThreads) {
      int const row = tile.x + i / pitch;
      int const r = i % pitch;
      int64_t const token = params.ids_are_64_bit ? __ldcg(static_cast<long long const*>(params.token_ids) + row)
                                                  : __ldcg(static_cast<int const*>(params.token_ids) + row);
      T* const to = static_cast<T*>(params.scratch.hidden) + static_cast<int64_t>(row) * work.rank_pitch + r;
      *to = r < record.lora_rank ? a[token * record.lora_rank + r] : T(0.f);
    }
  }
}

template <typename T>
cudaError_t launch_embed(EmbedParams const& params, LaunchConfig const& config) {
  return launch(embed_kernel<T>, config.num_sms * kEmbedBlocksPerSm, kEmbedThreads, params, config);
}

}  // namespace punica
