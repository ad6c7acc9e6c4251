// Rotary position embedding (Su et al. 2021, arXiv 2104.09864) of a step's queries and keys, out of the product of the fused
// projection, and the append of keys and values to the paged cache: what attention needs, in one launch.
#pragma once

#include "punica/rotary_params.h"
#include "punica/tile.cuh"

namespace punica {

constexpr int kRotaryThreads = 128;
constexpr int kRotaryItem = 16;  // elements of a thread: two vectors of eight, which are rotated into each other

// own · cos + other · sin; for the lower half of a head `other` is the negated upper one.
template <typename T>
__device__ inline Vec8 rotate(Vec8 const& own, Vec8 const& other, Vec8 const& cos, Vec8 const& sin, float sign) {
  Vec8 out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float const low = get<T>(own, 2 * i) * get<T>(cos, 2 * i) + sign * get<T>(other, 2 * i) * get<T>(sin, 2 * i);
    float const high =
        get<T>(own, 2 * i + 1) * get<T>(cos, 2 * i + 1) + sign * get<T>(other, 2 * i + 1) * get<T>(sin, 2 * i + 1);
    out.word[i] = Convert<T>::pack(low, high);
  }
  return out;
}

template <typename T>
__device__ inline Vec8 load_row(void const* rows, int64_t stride, int row, int column) {
  return from_raw(load16<Source::kActivation>(static_cast<T const*>(rows) + row * stride + column));
}

// Where a head of a row goes; null for keys and values of padding.
template <typename T>
__device__ inline T* target_of(RotaryAppendParams const& params, int row, int head, int kv_slot) {
  if (head < params.num_heads) {
    return static_cast<T*>(params.query) +
           (static_cast<int64_t>(row) * params.num_heads + head) * params.head_dim;
  }
  if (kv_slot < 0) return nullptr;
  int const kv_head = head - params.num_heads;
  bool const is_value = kv_head >= params.num_kv_heads;
  int64_t const place = static_cast<int64_t>(kv_slot / params.block_size) * params.block_stride +
                        static_cast<int64_t>(kv_slot % params.block_size) * params.token_stride;
  return static_cast<T*>(is_value ? params.values : params.keys) + place +
         static_cast<int64_t>(is_value ? kv_head - params.num_kv_heads : kv_head) * params.head_dim;
}

// Attention of a few short contexts leaves memory idle. Meanwhile what is read behind it can come nearer.
constexpr int kSoonRows = 16;         // steps of more rows keep memory busy themselves
constexpr int kSoonThreads = 4;       // of a block
constexpr int kSoonBytes = 16 << 10;  // of a request

__device__ inline void prefetch_share(RotaryAppendParams const& params, int share, int shares) {
  if (threadIdx.x >= kSoonThreads) return;
  auto const* const soon = static_cast<char const*>(params.soon);
  int64_t const stride = static_cast<int64_t>(shares) * kSoonThreads * kSoonBytes;
  for (int64_t at = (static_cast<int64_t>(share) * kSoonThreads + threadIdx.x) * kSoonBytes; at < params.soon_bytes;
       at += stride)
    prefetch(soon + at, static_cast<int>(min(static_cast<int64_t>(kSoonBytes), params.soon_bytes - at)));
}

// Several blocks share a row, so that few rows are spread over many multiprocessors; each thread has one item of a head.
template <typename T>
__global__ void __launch_bounds__(kRotaryThreads)
    rotary_append_kernel(const __grid_constant__ RotaryAppendParams params) {
  start_next();
  wait_for_previous();
  int const items_per_head = params.head_dim / kRotaryItem;
  int const items = (params.num_heads + 2 * params.num_kv_heads) * items_per_head;
  int const blocks_per_row = (items + kRotaryThreads - 1) / kRotaryThreads;
  int const row = blockIdx.x / blocks_per_row;
  if (row >= params.num_rows) {
    int const first = params.num_rows * blocks_per_row;
    return prefetch_share(params, static_cast<int>(blockIdx.x) - first, static_cast<int>(gridDim.x) - first);
  }
  int const item = blockIdx.x % blocks_per_row * kRotaryThreads + threadIdx.x;
  if (item >= items) return;
  int const head = item / items_per_head;
  int const rotary_items = head < params.num_heads + params.num_kv_heads ? params.rotary_dim / kRotaryItem : 0;
  int const index = item % items_per_head;
  bool const rotates = index < rotary_items;
  // The elements that rotate, or those behind them, in two halves.
  int const start = rotates ? 0 : rotary_items * kRotaryItem;
  int const half = ((rotates ? params.rotary_dim : params.head_dim) - start) / 2;
  int const lower_column = start + (rotates ? index : index - rotary_items) * 8;
  int const upper_column = lower_column + half;

  int const kv_slot = __ldcg(params.kv_slots + row);
  int const first = head * params.head_dim;
  Vec8 lower = load_row<T>(params.qkv, params.qkv_stride, row, first + lower_column);
  Vec8 upper = load_row<T>(params.qkv, params.qkv_stride, row, first + upper_column);
  if (rotates) {
    Vec8 const lower_cos = load_row<T>(params.cos, params.cos_stride, row, lower_column);
    Vec8 const lower_sin = load_row<T>(params.sin, params.sin_stride, row, lower_column);
    Vec8 const upper_cos = load_row<T>(params.cos, params.cos_stride, row, upper_column);
    Vec8 const upper_sin = load_row<T>(params.sin, params.sin_stride, row, upper_column);
    Vec8 const plain = lower;
    lower = rotate<T>(lower, upper, lower_cos, lower_sin, -1.0f);
    upper = rotate<T>(upper, plain, upper_cos, upper_sin, 1.0f);
  }
  T* const target = target_of<T>(params, row, head, kv_slot);
  if (target == nullptr) return;
  *reinterpret_cast<uint4*>(target + lower_column) = to_raw(lower);
  *reinterpret_cast<uint4*>(target + upper_column) = to_raw(upper);
}

template <typename T>
cudaError_t launch_rotary_append(RotaryAppendParams const& params, LaunchConfig const& config) {
  if (params.num_rows == 0) return cudaSuccess;
  int const items = (params.num_heads + 2 * params.num_kv_heads) * (params.head_dim / kRotaryItem);
  int const blocks_per_row = (items + kRotaryThreads - 1) / kRotaryThreads;
  int const prefetching = params.soon != nullptr && params.num_rows <= kSoonRows ? config.num_sms : 0;
  int const grid = params.num_rows * blocks_per_row + prefetching;
  return launch(rotary_append_kernel<T>, grid, kRotaryThreads, params, config);
}

}  // namespace punica
