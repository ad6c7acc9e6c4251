// Parameters of rotary_append: raw pointers, strides in elements. No torch here.
#pragma once

#include "punica/params.h"

namespace punica {

struct RotaryAppendParams {
  void const* qkv;          // [T, (H + 2 K) D], rows contiguous
  void const* cos;          // [T, rotary_dim], rows contiguous
  void const* sin;          // likewise
  void* query;              // [T, H, D], contiguous
  void* keys;               // the layer's keys in block 0: [blocks, P, K, D], strided between blocks
  void* values;             // likewise
  void const* soon;         // what the kernels behind this one read next, or null
  int32_t const* kv_slots;  // [T]: block_id * P + offset, or negative: keys and values are not written
  int64_t soon_bytes;
  int64_t qkv_stride;
  int64_t cos_stride;
  int64_t sin_stride;
  int64_t block_stride;
  int64_t token_stride;
  int num_rows;
  int num_heads;     // H
  int num_kv_heads;  // K
  int head_dim;      // D, a multiple of 16
  int rotary_dim;    // a multiple of 16, at most D
  int block_size;
};

template <typename T>
cudaError_t launch_rotary_append(RotaryAppendParams const& params, LaunchConfig const& config);

}  // namespace punica
