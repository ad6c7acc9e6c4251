// The plan builder as CPU ops, on torch's stable ABI like bindings.cpp. Schemas and reference: punica_core/ops/plan.py.

#include <cstdint>
#include <limits>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "punica/plan.h"

namespace {

using torch::stable::Tensor;

int32_t* int32_data(char const* name, Tensor const& tensor) {
  STD_TORCH_CHECK(tensor.dim() == 1 && tensor.is_contiguous() &&
                      tensor.scalar_type() == torch::headeronly::ScalarType::Int &&
                      tensor.numel() <= std::numeric_limits<int32_t>::max(),
                  name, " must be contiguous 1-D int32");
  return static_cast<int32_t*>(tensor.data_ptr());
}

// Words used; a lora_rank above max_rank as its negative.
int64_t words_used(punica::PlanResult const& result) {
  STD_TORCH_CHECK(result.error != punica::PlanError::kSlot, "slot ", result.value, " is not in the tables");
  STD_TORCH_CHECK(result.error != punica::PlanError::kOrder, "seg_indptr must start at 0 and not decrease, see entry ",
                  result.value);
  STD_TORCH_CHECK(result.error != punica::PlanError::kCapacity, "the plan does not fit ", result.value + punica::kNumCounters, " words");
  STD_TORCH_CHECK(result.error != punica::PlanError::kSegments, result.value, " segments are more than allowed");
  return result.error == punica::PlanError::kRank ? -result.value : result.value;
}

int64_t build_plan(Tensor plan, Tensor seg_indptr, Tensor seg_slot, Tensor slot_rank, int64_t max_rank) {
  int32_t* const words = int32_data("plan", plan);
  int32_t const* const indptr = int32_data("seg_indptr", seg_indptr);
  int32_t const* const slots = int32_data("seg_slot", seg_slot);
  int32_t const* const ranks = int32_data("slot_rank", slot_rank);
  STD_TORCH_CHECK(seg_indptr.numel() == seg_slot.numel() + 1, "seg_indptr must have one entry more than seg_slot");
  return words_used(punica::build_plan(words, plan.numel() - punica::kNumCounters, indptr, slots, static_cast<int>(seg_slot.numel()), ranks,
                                       slot_rank.numel(), static_cast<int>(max_rank)));
}

int64_t build_row_plan(Tensor plan, Tensor row_slots, Tensor slot_rank, int64_t max_segments, int64_t max_rank) {
  int32_t* const words = int32_data("plan", plan);
  int32_t const* const slots = int32_data("row_slots", row_slots);
  int32_t const* const ranks = int32_data("slot_rank", slot_rank);
  return words_used(punica::build_row_plan(words, plan.numel() - punica::kNumCounters, slots, static_cast<int>(row_slots.numel()), max_segments, ranks,
                                           slot_rank.numel(), static_cast<int>(max_rank)));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(punica, CPU, library) {
  library.impl("build_plan", TORCH_BOX(&build_plan));
  library.impl("build_row_plan", TORCH_BOX(&build_row_plan));
}
