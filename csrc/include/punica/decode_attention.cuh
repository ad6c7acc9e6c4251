// Attention of one token a sequence over its blocks of the cache, each sequence and KV head whole in one thread block: for
// contexts too short, or batches too large, for being cut to pay.
//
// Tokens are the rows of the tensor core's tile and the G query heads of a KV head its eight columns: S^T = K q^T, and
// O^T = V^T P. A lane loads 16 consecutive bytes of a key or value row, and that is its operand: the sum over the head dim may
// run in any order, and so may the rows of O^T. Keys and values pass through no shared memory. The warps take blocks of 16
// tokens in turn, and each asks for its next keys and values as soon as the registers are free. They are kept to 128
// registers a thread, so that a multiprocessor has room for 16 warps, each with up to 8 KB on the way.
#pragma once

#include <cmath>

#include "punica/decode_params.h"
#include "punica/tile.cuh"

namespace punica {

constexpr float kLog2E = 1.4426950408889634f;

// A block of 16 tokens in the registers of a warp: lane 4 g + q has keys of tokens g and g + 8, and values of tokens
// 2q, 2q + 1, 2q + 8, 2q + 9.
template <int kHeadDim>
struct KvTile {
  Vec8 keys[kHeadDim / 32][2];    // columns 32 i + 8 q ..
  Vec8 values[kHeadDim / 64][4];  // columns 64 i + 8 g ..
};

// What a warp has summed up of the tokens it has seen. Heads 2q and 2q + 1 are this lane's.
template <int kHeadDim>
struct KvSums {
  float out[kHeadDim / 16][4];  // [4 i + w]: columns 64 i + 8 g + 2 w (first two) and the one behind (last two)
  float largest[2];             // score, times log2 e
  float total[2];               // of the weights of this lane's tokens

  __device__ void clear() {
#pragma unroll
    for (auto& tile : out) tile[0] = tile[1] = tile[2] = tile[3] = 0.0f;
    largest[0] = largest[1] = -INFINITY;
    total[0] = total[1] = 0.0f;
  }
};

// Where the tokens of one sequence lie that its query sees.
struct KvRange {
  int first_entry;  // of kv_indices
  int num_tokens;
  int first_token;  // within the window

  __device__ int num_blocks() const { return (num_tokens + kDecodeBlock - 1) / kDecodeBlock; }
  __device__ int first_block() const { return first_token / kDecodeBlock; }
  __device__ bool sees(int token) const { return token >= first_token && token < num_tokens; }
};

__device__ inline KvRange load_range(DecodeAttentionParams const& params, int seq) {
  int const begin = __ldcg(params.kv_indptr + seq);
  int const end = __ldcg(params.kv_indptr + seq + 1);
  int const num_tokens = (end - begin - 1) * kDecodeBlock + __ldcg(params.last_block_len + seq);
  return {begin, num_tokens, params.window > 0 ? max(0, num_tokens - params.window) : 0};
}

template <typename T, int kHeadDim>
__device__ inline void load_keys(KvTile<kHeadDim>& tile, T const* rows, int token_stride) {
  int const lane = threadIdx.x % 32;
  T const* const own = rows + (lane / 4 * token_stride + lane % 4 * 8);
#pragma unroll
  for (int i = 0; i < kHeadDim / 32; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      tile.keys[i][half] = from_raw(load16<Source::kActivation>(own + half * 8 * token_stride + 32 * i));
}

// valid: tokens that exist. What lies behind them may be anything, and nothing times anything need not be nothing.
template <typename T, int kHeadDim>
__device__ inline void load_values(KvTile<kHeadDim>& tile, T const* rows, int token_stride, int valid) {
  int const lane = threadIdx.x % 32;
  int const first = lane % 4 * 2;
  T const* const own = rows + (first * token_stride + lane / 4 * 8);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    int const behind = j % 2 + j / 2 * 8;
#pragma unroll
    for (int i = 0; i < kHeadDim / 64; ++i)
      tile.values[i][j] = first + behind < valid
                              ? from_raw(load16<Source::kActivation>(own + (behind * token_stride + 64 * i)))
                              : zero8();
  }
}

__device__ inline float capped(float score, DecodeAttentionParams const& params) {
  if (params.softcap > 0.0f) score = params.softcap * tanhf(score / params.softcap);
  return score * kLog2E;
}

// The query heads of a KV head, zero where there are fewer than eight. The pitch keeps rows that are read at once in other banks.
template <int kHeadDim>
struct DecodeQuery {
  static constexpr int kPitch = kHeadDim / 8 + 4;
  uint4 rows[kDecodeHeads][kPitch];  // of eight elements each
};

template <typename T, int kHeadDim, int kThreads>
__device__ inline void load_query(DecodeQuery<kHeadDim>& query, T const* heads, int group) {
  constexpr int kVectors = kHeadDim / 8;
  for (int i = threadIdx.x; i < kDecodeHeads * kVectors; i += kThreads) {
    int const head = i / kVectors;
    query.rows[head][i % kVectors] = head < group ? load16<Source::kActivation>(heads + i * 8) : to_raw(zero8());
  }
}

// Scores [16 x 8] of a tile, times log2 e; -inf for what the query does not see.
template <typename T, int kHeadDim>
__device__ inline void score(float (&scores)[4], KvTile<kHeadDim> const& tile, DecodeQuery<kHeadDim> const& query,
                             KvRange const& range, int first_token, DecodeAttentionParams const& params) {
  scores[0] = scores[1] = scores[2] = scores[3] = 0.0f;
  int const lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kHeadDim / 32; ++i) {
    Vec8 const heads = from_raw(query.rows[lane / 4][4 * i + lane % 4]);
    mma_16x8x32<T>(scores, tile.keys[i][0], tile.keys[i][1], heads);
  }
  int const token = first_token + lane / 4;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    scores[i] = range.sees(token + i / 2 * 8) ? capped(scores[i] * params.scaling, params) : -INFINITY;
}

// Turns scores into weights relative to the largest so far, and brings the sums to that measure.
template <int kHeadDim>
__device__ inline void weigh(float (&scores)[4], KvSums<kHeadDim>& sums) {
#pragma unroll
  for (int head = 0; head < 2; ++head) {
    float largest = max(scores[head], scores[head + 2]);
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) largest = max(largest, shuffle_xor(largest, distance));
    largest = max(largest, sums.largest[head]);
    float const shrink = exp2f(sums.largest[head] - largest);
    sums.largest[head] = largest;
    scores[head] = exp2f(scores[head] - largest);
    scores[head + 2] = exp2f(scores[head + 2] - largest);
    sums.total[head] = sums.total[head] * shrink + scores[head] + scores[head + 2];
#pragma unroll
    for (auto& tile : sums.out) {
      tile[head] *= shrink;
      tile[head + 2] *= shrink;
    }
  }
}

__device__ inline uint32_t low_halves(uint32_t first, uint32_t second) { return (first & 0xffffu) | second << 16; }
__device__ inline uint32_t high_halves(uint32_t first, uint32_t second) { return first >> 16 | (second & 0xffff0000u); }

template <typename T, int kHeadDim>
__device__ inline void add_values(KvSums<kHeadDim>& sums, KvTile<kHeadDim> const& tile, float const (&weights)[4]) {
  // A lane has weights of its tokens g, g + 8 for two heads; the operand is of two tokens for head g.
  uint32_t const early = transposed_8x8(Convert<T>::pack(weights[0], weights[1]));
  uint32_t const late = transposed_8x8(Convert<T>::pack(weights[2], weights[3]));
#pragma unroll
  for (int i = 0; i < kHeadDim / 64; ++i) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      Vec8 const(&rows)[4] = tile.values[i];
      mma_16x8x16<T>(sums.out[4 * i + w], low_halves(rows[0].word[w], rows[1].word[w]),
                     high_halves(rows[0].word[w], rows[1].word[w]), low_halves(rows[2].word[w], rows[3].word[w]),
                     high_halves(rows[2].word[w], rows[3].word[w]), early, late);
    }
  }
}

// The ids of a warp's blocks, 32 at a time, one in each lane. first: its first entry of kv_indices.
template <int kWarps>
__device__ inline int block_id(DecodeAttentionParams const& params, int first, int index, int count, int& held) {
  int const lane = threadIdx.x % 32;
  if (index % 32 == 0) held = index + lane < count ? __ldcg(params.kv_indices + first + (index + lane) * kWarps) : 0;
  return shuffle(held, index % 32);
}

template <int kHeadDim, int kWarps>
struct DecodeShared {
  static constexpr int kPitch = kHeadDim + 8;  // floats; heads that are stored at once lie in other banks
  static constexpr int kSlots = kWarps < 8 ? kWarps : 8;
  float out[kSlots][kDecodeHeads][kPitch];
  float largest[kSlots][kDecodeHeads];
  float total[kSlots][kDecodeHeads];
  DecodeQuery<kHeadDim> query;
};

template <int kHeadDim, int kWarps>
__device__ inline void leave(DecodeShared<kHeadDim, kWarps>& shared, KvSums<kHeadDim> const& sums, int slot) {
  int const g = threadIdx.x % 32 / 4;
  int const q = threadIdx.x % 4;
#pragma unroll
  for (int head = 0; head < 2; ++head) {
    float total = sums.total[head];
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) total += shuffle_xor(total, distance);
    if (g == 0) {
      shared.largest[slot][2 * q + head] = sums.largest[head];
      shared.total[slot][2 * q + head] = total;
    }
    float* const row = shared.out[slot][2 * q + head] + 8 * g;
#pragma unroll
    for (int tile = 0; tile < kHeadDim / 16; ++tile) {
      row[tile / 4 * 64 + tile % 4 * 2] = sums.out[tile][head];
      row[tile / 4 * 64 + tile % 4 * 2 + 1] = sums.out[tile][head + 2];
    }
  }
}

// Adds what another warp left in a slot to this warp's own sums.
template <int kHeadDim, int kWarps>
__device__ inline void absorb(KvSums<kHeadDim>& sums, DecodeShared<kHeadDim, kWarps> const& shared, int slot) {
  int const g = threadIdx.x % 32 / 4;
  int const q = threadIdx.x % 4;
#pragma unroll
  for (int head = 0; head < 2; ++head) {
    float const other = shared.largest[slot][2 * q + head];
    if (other == -INFINITY) continue;  // it had no tokens
    float const largest = max(sums.largest[head], other);
    float const own_share = exp2f(sums.largest[head] - largest);
    float const other_share = exp2f(other - largest);
    sums.largest[head] = largest;
    sums.total[head] *= own_share;
    if (g == 0) sums.total[head] += other_share * shared.total[slot][2 * q + head];
    float const* const row = shared.out[slot][2 * q + head] + 8 * g;
#pragma unroll
    for (int tile = 0; tile < kHeadDim / 16; ++tile) {
      int const column = tile / 4 * 64 + tile % 4 * 2;
      sums.out[tile][head] = sums.out[tile][head] * own_share + other_share * row[column];
      sums.out[tile][head + 2] = sums.out[tile][head + 2] * own_share + other_share * row[column + 1];
    }
  }
  __syncwarp();  // the slot is this warp's from now on
}

// What the warps left, added up: two columns of a head at a time.
template <typename T, int kHeadDim, int kWarps>
__device__ inline void store_merged(DecodeShared<kHeadDim, kWarps> const& shared, T* out, int group) {
  for (int i = threadIdx.x; i < group * kHeadDim / 2; i += 32 * kWarps) {
    int const head = i / (kHeadDim / 2);
    int const column = i % (kHeadDim / 2) * 2;
    float largest = -INFINITY;
#pragma unroll
    for (int slot = 0; slot < shared.kSlots; ++slot) largest = max(largest, shared.largest[slot][head]);
    float total = 0.0f, low = 0.0f, high = 0.0f;
#pragma unroll
    for (int slot = 0; slot < shared.kSlots; ++slot) {
      float const share = exp2f(shared.largest[slot][head] - largest);
      total += share * shared.total[slot][head];
      low += share * shared.out[slot][head][column];
      high += share * shared.out[slot][head][column + 1];
    }
    *reinterpret_cast<uint32_t*>(out + head * kHeadDim + column) = Convert<T>::pack(low / total, high / total);
  }
}

constexpr int kDecodeWarps = 16;  // that a multiprocessor has room for

template <typename T, int kHeadDim, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, kDecodeWarps / kWarps)
    decode_attention_kernel(const __grid_constant__ DecodeAttentionParams params) {
  __shared__ DecodeShared<kHeadDim, kWarps> shared;
  int const seq = blockIdx.x / params.num_kv_heads;
  int const kv_head = blockIdx.x % params.num_kv_heads;
  int const group = params.num_heads / params.num_kv_heads;
  int const warp = threadIdx.x / 32;
  KvRange const range = load_range(params, seq);
  int const first_block = range.first_block() + warp;
  int const own_blocks = (range.num_blocks() - first_block + kWarps - 1) / kWarps;  // may be negative
  int held_ids = 0;
  auto const id_of = [&](int index) {
    return block_id<kWarps>(params, range.first_entry + first_block, index, own_blocks, held_ids);
  };
  KvTile<kHeadDim> tile;
  auto const rows_of = [&](void const* halves, int id) {
    return static_cast<T const*>(halves) + (id * params.block_stride + kv_head * kHeadDim);
  };
  auto const token_of = [&](int index) { return (first_block + index * kWarps) * kDecodeBlock; };

  // The kernel before writes the newest token, which lies in the last block. All others were there before this step.
  int id = own_blocks > 0 ? id_of(0) : 0;
  bool const is_written = first_block >= range.num_blocks() - 1;
  if (own_blocks > 0 && !is_written) {
    load_keys(tile, rows_of(params.keys, id), params.token_stride);
    load_values(tile, rows_of(params.values, id), params.token_stride, kDecodeBlock);
  }
  wait_for_previous();
  start_next();  // compiled kernels behind this one rely on all that came before it having ended
  if (own_blocks > 0 && is_written) {
    load_keys(tile, rows_of(params.keys, id), params.token_stride);
    load_values(tile, rows_of(params.values, id), params.token_stride, range.num_tokens - token_of(0));
  }
  int64_t const first_row = (static_cast<int64_t>(seq) * params.num_heads + kv_head * group) * kHeadDim;
  load_query<T, kHeadDim, 32 * kWarps>(shared.query, static_cast<T const*>(params.query) + first_row, group);
  __syncthreads();

  KvSums<kHeadDim> sums;
  sums.clear();
#pragma unroll 1
  for (int index = 0; index < own_blocks; ++index) {
    float scores[4];
    score<T>(scores, tile, shared.query, range, token_of(index), params);
    bool const has_next = index + 1 < own_blocks;
    if (has_next) {
      id = id_of(index + 1);
      load_keys(tile, rows_of(params.keys, id), params.token_stride);
    }
    weigh(scores, sums);
    add_values<T>(sums, tile, scores);
    if (has_next)
      load_values(tile, rows_of(params.values, id), params.token_stride, range.num_tokens - token_of(index + 1));
  }
  if constexpr (kWarps > 8) {
    if (warp >= 8) leave(shared, sums, warp - 8);
    __syncthreads();
    if (warp < 8) absorb(sums, shared, warp);
  }
  if (warp < 8) leave(shared, sums, warp);
  __syncthreads();
  store_merged(shared, static_cast<T*>(params.out) + first_row, group);
}

template <typename T, int kWarps>
cudaError_t launch_decode_attention_with(DecodeAttentionParams const& params, LaunchConfig const& config) {
  auto const kernel = params.head_dim == 128 ? decode_attention_kernel<T, 128, kWarps> : decode_attention_kernel<T, 64, kWarps>;
  return launch(kernel, params.num_seqs * params.num_kv_heads, 32 * kWarps, params, config);
}

// As many warps a block as let all blocks run at once: the fewer blocks, the fewer tokens a warp takes one after another.
template <typename T>
cudaError_t launch_decode_attention(DecodeAttentionParams const& params, LaunchConfig const& config) {
  int const grid = params.num_seqs * params.num_kv_heads;
  if (grid == 0) return cudaSuccess;
  if (grid <= config.num_sms) return launch_decode_attention_with<T, kDecodeWarps>(params, config);
  if (grid <= config.num_sms * kDecodeWarps / 8) return launch_decode_attention_with<T, 8>(params, config);
  if (grid <= config.num_sms * kDecodeWarps / 4) return launch_decode_attention_with<T, 4>(params, config);
  return launch_decode_attention_with<T, 2>(params, config);
}

}  // namespace punica
