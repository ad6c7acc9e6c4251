// Writes the keys and values of a step's tokens into the paged cache: cache[block, layer, 0 or 1, offset] = key or value.
#pragma once

#include "punica/tile.cuh"

namespace punica {

constexpr int kAppendThreads = 128;

// A thread moves 16 bytes at a time; rows whose slot is negative are padding.
template <typename T>
__global__ void __launch_bounds__(kAppendThreads) kv_append_kernel(const __grid_constant__ KvAppendParams params) {
  start_next();
  wait_for_previous();
  constexpr int kVector = 16 / sizeof(T);
  int const vectors_per_head = params.head_dim / kVector;
  int const vectors_per_row = params.num_heads * vectors_per_head;
  for (int row = blockIdx.x; row < params.num_rows; row += gridDim.x) {
    int const kv_slot = __ldcg(params.kv_slots + row);
    if (kv_slot < 0) continue;
    int64_t const target = static_cast<int64_t>(kv_slot / params.block_size) * params.block_stride +
                           static_cast<int64_t>(kv_slot % params.block_size) * params.token_stride;
    T* const keys = static_cast<T*>(params.keys) + target;
    T* const values = static_cast<T*>(params.values) + target;
    for (int i = threadIdx.x; i < 2 * vectors_per_row; i += kAppendThreads) {
      bool const is_value = i >= vectors_per_row;
      int const j = is_value ? i - vectors_per_row : i;
      int64_t const head = j / vectors_per_head;
      int64_t const column = static_cast<int64_t>(j % vectors_per_head) * kVector;
      T const* const source = is_value ? static_cast<T const*>(params.value) + row * params.value_row_stride +
                                             head * params.value_head_stride + column
                                       : static_cast<T const*>(params.key) + row * params.key_row_stride +
                                             head * params.key_head_stride + column;
      T* const destination = (is_value ? values : keys) + head * params.head_dim + column;
      *reinterpret_cast<int4*>(destination) = __ldcg(reinterpret_cast<int4 const*>(source));
    }
  }
}

template <typename T>
cudaError_t launch_kv_append(KvAppendParams const& params, LaunchConfig const& config) {
  if (params.num_rows == 0) return cudaSuccess;
  return launch(kv_append_kernel<T>, params.num_rows < config.num_sms * 8 ? params.num_rows : config.num_sms * 8,
                kAppendThreads, params, config);
}

}  // namespace punica
