// The binding of rotary_append, whose schema and documentation are in punica_core/ops/__init__.py.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <optional>

#include "bindings.h"
#include "punica/rotary_params.h"

namespace {

using punica::to_int;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check_vectors(char const* name, Tensor const& rows, int64_t num_rows, int64_t width, Tensor const& cache) {
  STD_TORCH_CHECK(rows.dim() == 2 && rows.size(0) == num_rows && rows.size(1) == width && rows.stride(1) == 1 &&
                      rows.stride(0) % 8 == 0 && rows.scalar_type() == cache.scalar_type() &&
                      reinterpret_cast<uintptr_t>(rows.data_ptr()) % 16 == 0,
                  name, " must be [", num_rows, ", ", width, "] of the cache's dtype, its rows contiguous and on 16 bytes");
}

void check_cache(Tensor const& cache, int64_t layer) {
  STD_TORCH_CHECK(cache.dim() == 6 && cache.is_contiguous(), "cache must be contiguous [blocks, L, 2, P, K, D]");
  STD_TORCH_CHECK(cache.scalar_type() == ScalarType::BFloat16 || cache.scalar_type() == ScalarType::Half,
                  "the CUDA kernel takes bfloat16 and float16");
  STD_TORCH_CHECK(layer >= 0 && layer < cache.size(1), "layer ", layer, " of ", cache.size(1));
  STD_TORCH_CHECK(cache.size(5) % 16 == 0, "head dim must be a multiple of 16, got ", cache.size(5));
}

punica::RotaryAppendParams make_params(Tensor const& query, Tensor const& cache, Tensor const& qkv, Tensor const& cos,
                                       Tensor const& sin, Tensor const& kv_slots, int64_t layer) {
  check_cache(cache, layer);
  int64_t const rows = kv_slots.size(0);
  int64_t const kv_heads = cache.size(4);
  int64_t const head_dim = cache.size(5);
  STD_TORCH_CHECK(kv_slots.dim() == 1 && kv_slots.is_contiguous() && kv_slots.scalar_type() == ScalarType::Int,
                  "kv_slots must be contiguous 1-D int32");
  STD_TORCH_CHECK(query.dim() == 3 && query.is_contiguous() && query.size(0) == rows && query.size(2) == head_dim &&
                      query.scalar_type() == cache.scalar_type() &&
                      reinterpret_cast<uintptr_t>(query.data_ptr()) % 16 == 0,
                  "query must be contiguous [T, H, D] of the cache's dtype");
  check_vectors("qkv", qkv, rows, (query.size(1) + 2 * kv_heads) * head_dim, cache);
  int64_t const rotary_dim = cos.size(1);
  STD_TORCH_CHECK(rotary_dim % 16 == 0 && rotary_dim >= 16 && rotary_dim <= head_dim,
                  "cos must have a multiple of 16 columns, at most the head dim, got ", rotary_dim);
  check_vectors("cos", cos, rows, rotary_dim, cache);
  check_vectors("sin", sin, rows, rotary_dim, cache);
  int64_t const element_size = 2;
  punica::RotaryAppendParams params{};
  params.qkv = qkv.data_ptr();
  params.cos = cos.data_ptr();
  params.sin = sin.data_ptr();
  params.query = query.data_ptr();
  params.keys = static_cast<char*>(cache.data_ptr()) + layer * cache.stride(1) * element_size;
  params.values = static_cast<char*>(params.keys) + cache.stride(2) * element_size;
  params.kv_slots = static_cast<int32_t const*>(kv_slots.data_ptr());
  params.qkv_stride = qkv.stride(0);
  params.cos_stride = cos.stride(0);
  params.sin_stride = sin.stride(0);
  params.block_stride = cache.stride(0);
  params.token_stride = cache.stride(3);
  params.num_rows = to_int(rows);
  params.num_heads = to_int(query.size(1));
  params.num_kv_heads = to_int(kv_heads);
  params.head_dim = to_int(head_dim);
  params.rotary_dim = to_int(rotary_dim);
  params.block_size = to_int(cache.size(3));
  return params;
}

void rotary_append(Tensor query, Tensor cache, Tensor qkv, Tensor cos, Tensor sin, Tensor kv_slots, int64_t layer,
                   std::optional<Tensor> soon) {
  torch::stable::accelerator::DeviceGuard const guard(cache.get_device_index());
  auto params = make_params(query, cache, qkv, cos, sin, kv_slots, layer);
  if (soon.has_value()) {
    STD_TORCH_CHECK(soon->is_contiguous() && reinterpret_cast<uintptr_t>(soon->data_ptr()) % 16 == 0,
                    "soon must be contiguous on 16 bytes");
    params.soon = soon->data_ptr();
    params.soon_bytes = soon->numel() * static_cast<int64_t>(soon->element_size()) / 16 * 16;
  }
  auto const launch = cache.scalar_type() == ScalarType::BFloat16 ? punica::launch_rotary_append<__nv_bfloat16>
                                                                  : punica::launch_rotary_append<__half>;
  punica::check_cuda(launch(params, punica::launch_config(cache)), "rotary_append");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(punica, CUDA, library) { library.impl("rotary_append", TORCH_BOX(&rotary_append)); }
