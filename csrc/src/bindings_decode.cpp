// The binding of decode_attention, whose schema and documentation are in punica_core/ops/__init__.py.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "bindings.h"
#include "punica/decode_params.h"

namespace {

using punica::to_int;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check_cache(Tensor const& cache, int64_t layer) {
  STD_TORCH_CHECK(cache.dim() == 6 && cache.is_contiguous(), "cache must be contiguous [blocks, L, 2, P, K, D]");
  STD_TORCH_CHECK(cache.scalar_type() == ScalarType::BFloat16 || cache.scalar_type() == ScalarType::Half,
                  "the CUDA kernel takes bfloat16 and float16");
  STD_TORCH_CHECK(layer >= 0 && layer < cache.size(1), "layer ", layer, " of ", cache.size(1));
  STD_TORCH_CHECK(cache.size(3) == punica::kDecodeBlock, "blocks must hold ", punica::kDecodeBlock, " tokens, got ",
                  cache.size(3));
  STD_TORCH_CHECK(cache.size(5) == 64 || cache.size(5) == 128, "head dim must be 64 or 128, got ", cache.size(5));
}

void check_heads(char const* name, Tensor const& rows, Tensor const& cache) {
  STD_TORCH_CHECK(rows.dim() == 3 && rows.is_contiguous() && rows.size(2) == cache.size(5) &&
                      rows.size(1) % cache.size(4) == 0 && rows.size(1) / cache.size(4) <= punica::kDecodeHeads &&
                      rows.scalar_type() == cache.scalar_type() && reinterpret_cast<uintptr_t>(rows.data_ptr()) % 16 == 0,
                  name, " must be contiguous [B, H, D] of the cache's dtype, H at most ", punica::kDecodeHeads, " times K");
}

void check_table(char const* name, Tensor const& table, int64_t size) {
  STD_TORCH_CHECK(table.dim() == 1 && table.is_contiguous() && table.scalar_type() == ScalarType::Int &&
                      (size < 0 || table.size(0) == size),
                  name, " must be contiguous 1-D int32");
}

void decode_attention(Tensor out, Tensor query, Tensor cache, Tensor kv_indptr, Tensor kv_indices, Tensor last_block_len,
                      int64_t layer, double scaling, int64_t window, double softcap) {
  torch::stable::accelerator::DeviceGuard const guard(cache.get_device_index());
  check_cache(cache, layer);
  check_heads("query", query, cache);
  check_heads("out", out, cache);
  STD_TORCH_CHECK(out.size(0) == query.size(0) && out.size(1) == query.size(1), "out must have the query's shape");
  check_table("kv_indptr", kv_indptr, query.size(0) + 1);
  check_table("kv_indices", kv_indices, -1);
  check_table("last_block_len", last_block_len, query.size(0));
  int64_t const element_size = 2;
  punica::DecodeAttentionParams params{};
  params.query = query.data_ptr();
  params.out = out.data_ptr();
  params.keys = static_cast<char const*>(cache.data_ptr()) + layer * cache.stride(1) * element_size;
  params.values = static_cast<char const*>(params.keys) + cache.stride(2) * element_size;
  params.kv_indptr = static_cast<int32_t const*>(kv_indptr.data_ptr());
  params.kv_indices = static_cast<int32_t const*>(kv_indices.data_ptr());
  params.last_block_len = static_cast<int32_t const*>(last_block_len.data_ptr());
  params.block_stride = cache.stride(0);
  params.token_stride = to_int(cache.stride(3));
  params.num_seqs = to_int(query.size(0));
  params.num_heads = to_int(query.size(1));
  params.num_kv_heads = to_int(cache.size(4));
  params.head_dim = to_int(cache.size(5));
  params.window = to_int(window);
  params.scaling = static_cast<float>(scaling);
  params.softcap = static_cast<float>(softcap);
  auto const launch = cache.scalar_type() == ScalarType::BFloat16 ? punica::launch_decode_attention<__nv_bfloat16>
                                                                  : punica::launch_decode_attention<__half>;
  punica::check_cuda(launch(params, punica::launch_config(cache)), "decode_attention");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(punica, CUDA, library) { library.impl("decode_attention", TORCH_BOX(&decode_attention)); }
