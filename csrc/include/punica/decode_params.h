// Parameters of decode_attention: raw pointers, strides in elements. No torch here.
#pragma once

#include "punica/params.h"

namespace punica {

constexpr int kDecodeBlock = 16;  // tokens of a block of the cache
constexpr int kDecodeHeads = 8;   // most query heads of a KV head

struct DecodeAttentionParams {
  void const* query;              // [B, H, D], contiguous
  void* out;                      // likewise
  void const* keys;               // the layer's keys in block 0: [blocks, P, K, D], strided between blocks
  void const* values;             // likewise
  int32_t const* kv_indptr;       // [B + 1]: where each sequence's entries of kv_indices begin
  int32_t const* kv_indices;      // block ids
  int32_t const* last_block_len;  // [B]: tokens in the last block of each
  int64_t block_stride;
  int token_stride;
  int num_seqs;
  int num_heads;     // H
  int num_kv_heads;  // K
  int head_dim;      // 64 or 128
  int window;        // tokens that a query sees, 0: all
  float scaling;     // of the scores
  float softcap;     // 0: none
};

template <typename T>
cudaError_t launch_decode_attention(DecodeAttentionParams const& params, LaunchConfig const& config);

}  // namespace punica
