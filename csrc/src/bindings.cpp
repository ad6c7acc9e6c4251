// The files of this folder that end in .cpp, with bindings.h and tables.h, are the only ones that know torch: checks, dtype dispatch,
// and registration of the implementations. Written on torch's stable ABI, so that they compile without a GPU build of torch and one
// library serves several versions of it. Here: the ops whose schemas and documentation are in punica_core/ops/__init__.py.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "beside.h"
#include "bindings.h"
#include "maps.h"
#include "punica/prompt_params.h"
#include "tables.h"

namespace {

using punica::check_cuda;
using punica::launch_config;
using punica::make_scratch;
using punica::make_tables;
using punica::to_int;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check_rows(char const* name, Tensor const& rows, Tensor const& arena) {
  STD_TORCH_CHECK(rows.dim() == 2 && rows.stride(1) == 1, name, " must be 2-D with contiguous rows");
  STD_TORCH_CHECK(rows.scalar_type() == arena.scalar_type(), name, " and the arena must have one dtype");
}

template <typename Params>
void dispatch(Tensor const& arena, char const* what, cudaError_t (*bf16)(Params const&, punica::LaunchConfig const&),
              cudaError_t (*fp16)(Params const&, punica::LaunchConfig const&), Params const& params,
              punica::LaunchConfig const& config) {
  check_cuda((arena.scalar_type() == ScalarType::BFloat16 ? bf16 : fp16)(params, config), what);
}

bool has_prompt_clusters(Tensor const& arena, punica::Scratch const& scratch, punica::LaunchConfig const& config) {
  auto const clusters = arena.scalar_type() == ScalarType::BFloat16 ? punica::prompt_clusters<__nv_bfloat16> : punica::prompt_clusters<__half>;
  return clusters(scratch, config).count > 0;
}

punica::PromptParams make_prompt(punica::ShrinkParams const& shrink, Tensor const& x, Tensor const& arena) {
  punica::ArenaMatrix const matrix(arena.numel(), shrink.in_features);
  auto const row_bytes = static_cast<cuuint64_t>(shrink.in_features) * 2;
  cuuint64_t const start_bytes = punica::kStartElements * 2;
  cuuint64_t const sizes[] = {punica::kPromptColumns, static_cast<cuuint64_t>(matrix.rows), row_bytes / start_bytes};
  cuuint64_t const strides[] = {row_bytes, start_bytes};
  cuuint32_t const box[] = {punica::kPromptColumns, punica::kPromptBoxRows, 1};
  cuuint32_t const tall_box[] = {punica::kPromptColumns, punica::kMaxTileRows, 1};
  auto* const begin = static_cast<char*>(arena.data_ptr()) - matrix.shift * 2;
  auto const x_map = [&](int rows) { return punica::make_map(x, punica::kPromptColumns, rows); };
  auto const a_map = [&](auto const& box) { return punica::encode_map<3>(arena.scalar_type(), begin, sizes, strides, box); };
  return {x_map(punica::kPromptBoxRows), x_map(punica::kMaxTileRows), a_map(box), a_map(tall_box), shrink, matrix.shift};
}

void lora_shrink(Tensor v, Tensor x, Tensor arena, Tensor table, Tensor plan, int64_t max_rank, bool summed, bool beside) {
  torch::stable::accelerator::DeviceGuard const guard(x.get_device_index());
  check_rows("x", x, arena);
  auto const config = launch_config(x);
  punica::ShrinkParams params{};
  params.tables = make_tables(arena, table, plan);
  params.scratch = make_scratch(v, plan, x.size(0), params.tables.slices, max_rank, config.num_sms, summed);
  params.x = x.data_ptr();
  params.x_stride = x.stride(0);
  params.in_features = to_int(x.size(1));
  params.beside = beside && config.dependent_launch;
  if (punica::takes_prompt(params, config) && has_prompt_clusters(arena, params.scratch, config)) {
    auto const prompt = make_prompt(params, x, arena);
    dispatch(arena, "lora_shrink", punica::launch_prompt<__nv_bfloat16>, punica::launch_prompt<__half>, prompt, config);
    return;
  }
  dispatch(arena, "lora_shrink", punica::launch_shrink<__nv_bfloat16>, punica::launch_shrink<__half>, params, config);
  if (params.beside) check_cuda(punica::beside().release(config.stream), "lora_shrink");
}

void lora_embed(Tensor v, Tensor token_ids, Tensor arena, Tensor table, Tensor plan, int64_t max_rank) {
  torch::stable::accelerator::DeviceGuard const guard(token_ids.get_device_index());
  STD_TORCH_CHECK(token_ids.dim() == 1 && token_ids.is_contiguous() &&
                      (token_ids.scalar_type() == ScalarType::Int || token_ids.scalar_type() == ScalarType::Long),
                  "token_ids must be contiguous 1-D int32 or int64");
  auto const config = launch_config(token_ids);
  punica::EmbedParams params{};
  params.tables = make_tables(arena, table, plan);
  STD_TORCH_CHECK(params.tables.slices == 1, "lora_embed takes one slice");
  params.scratch = make_scratch(v, plan, token_ids.size(0), 1, max_rank, config.num_sms, true);
  params.token_ids = token_ids.data_ptr();
  params.ids_are_64_bit = token_ids.scalar_type() == ScalarType::Long;
  dispatch(arena, "lora_embed", punica::launch_embed<__nv_bfloat16>, punica::launch_embed<__half>, params, config);
}

void lora_expand(Tensor y, Tensor v, Tensor arena, Tensor table, Tensor plan, std::vector<int64_t> out_features,
                 int64_t in_features, int64_t max_rank, bool summed, std::optional<Tensor> /* x: kept until here */, bool overwrite) {
  torch::stable::accelerator::DeviceGuard const guard(y.get_device_index());
  check_rows("y", y, arena);
  auto config = launch_config(y);
  bool joined = false;
  check_cuda(punica::beside().join(config.stream, joined), "lora_expand");
  config.dependent_launch = config.dependent_launch && !joined;
  punica::ExpandParams params{};
  params.tables = make_tables(arena, table, plan);
  params.scratch = make_scratch(v, plan, y.size(0), params.tables.slices, max_rank, config.num_sms, summed);
  params.y = y.data_ptr();
  params.y_stride = y.stride(0);
  params.in_features = to_int(in_features);
  STD_TORCH_CHECK(summed || !overwrite, "overwrite needs rows that lora_shrink has summed");
  params.overwrite = overwrite;
  STD_TORCH_CHECK(static_cast<int>(out_features.size()) == params.tables.slices, "out_features must name every slice");
  int column = 0;
  int units = 0;
  for (int slice = 0; slice < params.tables.slices; ++slice) {
    params.widths[slice] = to_int(out_features[slice]);
    params.columns[slice] = column;
    column += params.widths[slice];
    units += (params.widths[slice] + punica::kWarpColumns - 1) / punica::kWarpColumns;
    params.unit_end[slice] = units;
  }
  STD_TORCH_CHECK(column == y.size(1), "out_features add up to ", column, ", y has ", y.size(1), " columns");
  dispatch(arena, "lora_expand", punica::launch_expand<__nv_bfloat16>, punica::launch_expand<__half>, params, config);
}

void segment_gemm(Tensor y, Tensor x, Tensor arena, Tensor table, Tensor plan) {
  torch::stable::accelerator::DeviceGuard const guard(y.get_device_index());
  check_rows("x", x, arena);
  check_rows("y", y, arena);
  STD_TORCH_CHECK(x.size(0) == y.size(0), "x has ", x.size(0), " rows, y has ", y.size(0));
  punica::SegmentGemmParams params{};
  params.tables = make_tables(arena, table, plan);
  STD_TORCH_CHECK(params.tables.slices == 1, "segment_gemm takes one slice");
  params.x = x.data_ptr();
  params.y = y.data_ptr();
  params.x_stride = x.stride(0);
  params.y_stride = y.stride(0);
  params.in_features = to_int(x.size(1));
  params.out_features = to_int(y.size(1));
  dispatch(arena, "segment_gemm", punica::launch_segment_gemm<__nv_bfloat16>, punica::launch_segment_gemm<__half>, params,
           launch_config(y));
}

void kv_append(Tensor cache, Tensor key, Tensor value, Tensor kv_slots, int64_t layer) {
  torch::stable::accelerator::DeviceGuard const guard(cache.get_device_index());
  STD_TORCH_CHECK(cache.dim() == 6 && cache.is_contiguous(), "cache must be contiguous [blocks, L, 2, P, K, D]");
  STD_TORCH_CHECK(cache.scalar_type() == ScalarType::BFloat16 || cache.scalar_type() == ScalarType::Half,
                  "the CUDA kernel takes bfloat16 and float16");
  STD_TORCH_CHECK(cache.size(5) % 8 == 0, "head dim must be a multiple of 8, got ", cache.size(5));
  STD_TORCH_CHECK(layer >= 0 && layer < cache.size(1), "layer ", layer, " of ", cache.size(1));
  STD_TORCH_CHECK(kv_slots.dim() == 1 && kv_slots.is_contiguous() && kv_slots.scalar_type() == ScalarType::Int,
                  "kv_slots must be contiguous 1-D int32");
  for (Tensor const* rows : {&key, &value}) {
    STD_TORCH_CHECK(rows->dim() == 3 && rows->size(0) == kv_slots.size(0) && rows->size(1) == cache.size(4) &&
                        rows->size(2) == cache.size(5) && rows->stride(2) == 1 && rows->stride(0) % 8 == 0 &&
                        rows->stride(1) % 8 == 0 && rows->scalar_type() == cache.scalar_type() &&
                        reinterpret_cast<uintptr_t>(rows->data_ptr()) % 16 == 0,
                    "key and value must be [T, K, D] of the cache's dtype with heads that start on 16 bytes");
  }
  int const element_size = 2;
  int64_t const half = cache.stride(2);
  auto* const keys = static_cast<char*>(cache.data_ptr()) + layer * cache.stride(1) * element_size;
  punica::KvAppendParams params{};
  params.key = key.data_ptr();
  params.value = value.data_ptr();
  params.keys = keys;
  params.values = keys + half * element_size;
  params.kv_slots = static_cast<int32_t const*>(kv_slots.data_ptr());
  params.key_row_stride = key.stride(0);
  params.key_head_stride = key.stride(1);
  params.value_row_stride = value.stride(0);
  params.value_head_stride = value.stride(1);
  params.block_stride = cache.stride(0);
  params.token_stride = cache.stride(3);
  params.num_rows = to_int(kv_slots.size(0));
  params.num_heads = to_int(cache.size(4));
  params.head_dim = to_int(cache.size(5));
  params.block_size = to_int(cache.size(3));
  dispatch(cache, "kv_append", punica::launch_kv_append<__nv_bfloat16>, punica::launch_kv_append<__half>, params,
           launch_config(cache));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(punica, CUDA, library) {
  library.impl("lora_shrink", TORCH_BOX(&lora_shrink));
  library.impl("lora_embed", TORCH_BOX(&lora_embed));
  library.impl("lora_expand", TORCH_BOX(&lora_expand));
  library.impl("segment_gemm", TORCH_BOX(&segment_gemm));
  library.impl("kv_append", TORCH_BOX(&kv_append));
}
