// Tensors as the kernels' parameters, for the bindings of ops that take an arena, a table and a plan.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

#include "bindings.h"

namespace punica {

// Kernels read sixteen bytes at a time.
inline void check_start(char const* name, torch::stable::Tensor const& tensor) {
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0, name, " must start on 16 bytes");
}

inline Tables make_tables(torch::stable::Tensor const& arena, torch::stable::Tensor const& table, torch::stable::Tensor const& plan) {
  STD_TORCH_CHECK(arena.scalar_type() == torch::headeronly::ScalarType::BFloat16 || arena.scalar_type() == torch::headeronly::ScalarType::Half,
                  "the CUDA kernels take bfloat16 and float16; use `sgmv: reference` for other dtypes");
  STD_TORCH_CHECK(arena.dim() == 1 && arena.is_contiguous(), "arena must be contiguous 1-D");
  int64_t const record_words = sizeof(TableRecord) / 8;
  STD_TORCH_CHECK(table.dim() == 3 && table.scalar_type() == torch::headeronly::ScalarType::Long && table.size(0) >= 1 &&
                      table.size(0) <= kMaxSlices && table.size(2) == record_words && table.stride(2) == 1 &&
                      table.stride(0) % record_words == 0 && table.stride(1) % record_words == 0,
                  "table must be int64 [1..", kMaxSlices, " slices, N, 6] of whole records");
  STD_TORCH_CHECK(plan.dim() == 1 && plan.is_contiguous() && plan.scalar_type() == torch::headeronly::ScalarType::Int,
                  "plan must be contiguous 1-D int32");
  for (auto const& [name, tensor] : {std::pair{"arena", &arena}, {"table", &table}, {"plan", &plan}}) check_start(name, *tensor);
  return {arena.data_ptr(), static_cast<TableRecord const*>(table.data_ptr()),
          static_cast<int32_t const*>(plan.data_ptr()), to_int(table.size(0)), to_int(table.stride(0) / record_words),
          to_int(table.stride(1) / record_words)};
}

inline Scratch make_scratch(torch::stable::Tensor const& v, torch::stable::Tensor const& plan, int64_t num_rows, int slices, int64_t max_rank, int num_sms,
                             bool summed) {
  STD_TORCH_CHECK(v.dim() == 1 && v.is_contiguous() && v.scalar_type() == torch::headeronly::ScalarType::Float, "v must be contiguous 1-D float32");
  check_start("v", v);
  STD_TORCH_CHECK(max_rank >= 8 && max_rank <= kMaxRank && max_rank % 8 == 0,
                  "max_rank must be a multiple of 8 up to ", kMaxRank, ", got ", max_rank);
  int64_t const split = std::max<int64_t>(num_rows * slices * max_rank, 1);
  STD_TORCH_CHECK(v.numel() >= num_rows * slices * max_rank, "v holds ", v.numel(), " floats, want at least ", split);
  STD_TORCH_CHECK(plan.numel() > kNumCounters, "plan has no room for its counters");
  auto* const start = static_cast<float*>(v.data_ptr());
  int64_t const first_part = summed ? split / 2 : 0;
  int64_t const room = (v.numel() - first_part) / split;
  int const max_splits = static_cast<int>(std::min<int64_t>(room, std::numeric_limits<int>::max()));
  int const num_blocks = num_sms * shrink_blocks_per_sm(to_int(num_rows));
  int* const counters = static_cast<int*>(plan.data_ptr()) + plan.numel() - kNumCounters;
  return {start, start + first_part, counters, to_int(num_rows), max_splits, num_blocks, static_cast<int>(max_rank), summed};
}

}  // namespace punica
