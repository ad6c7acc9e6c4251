// The sampling ops, on torch's stable ABI like bindings.cpp. Schemas and reference: punica_core/ops/sample.py.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "bindings.h"
#include "punica/sample_params.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

punica::SampleParams make_params(Tensor const& token_ids, Tensor const& finite, Tensor const& logits) {
  STD_TORCH_CHECK(logits.dim() == 2 && logits.stride(1) == 1 && logits.size(1) >= 1 && logits.size(1) <= punica::kMaxVocab,
                  "logits must be [B, 1..", punica::kMaxVocab, "] with contiguous rows");
  STD_TORCH_CHECK(token_ids.dim() == 1 && token_ids.is_contiguous() && token_ids.size(0) == logits.size(0) &&
                      token_ids.scalar_type() == ScalarType::Long,
                  "token_ids must be contiguous int64 [", logits.size(0), "]");
  STD_TORCH_CHECK(finite.dim() == 1 && finite.is_contiguous() && finite.size(0) == logits.size(0) &&
                      finite.scalar_type() == ScalarType::Bool,
                  "finite must be contiguous bool [", logits.size(0), "]");
  punica::SampleParams params{};
  params.logits = logits.data_ptr();
  params.token_ids = static_cast<int64_t*>(token_ids.data_ptr());
  params.finite = static_cast<bool*>(finite.data_ptr());
  params.logits_stride = logits.stride(0);
  params.num_rows = punica::to_int(logits.size(0));
  params.vocab_size = punica::to_int(logits.size(1));
  return params;
}

void launch(Tensor const& logits, punica::SampleParams const& params, char const* what) {
  auto const config = punica::launch_config(logits);
  switch (logits.scalar_type()) {
    case ScalarType::Float: return punica::check_cuda(punica::launch_sample<float>(params, config), what);
    case ScalarType::BFloat16: return punica::check_cuda(punica::launch_sample<__nv_bfloat16>(params, config), what);
    case ScalarType::Half: return punica::check_cuda(punica::launch_sample<__half>(params, config), what);
    default: STD_TORCH_CHECK(false, "logits must be float32, bfloat16 or float16");
  }
}

void sample_tokens(Tensor token_ids, Tensor finite, Tensor logits, Tensor rows) {
  torch::stable::accelerator::DeviceGuard const guard(logits.get_device_index());
  punica::SampleParams params = make_params(token_ids, finite, logits);
  STD_TORCH_CHECK(rows.dim() == 2 && rows.is_contiguous() && rows.scalar_type() == ScalarType::Long &&
                      rows.size(0) == logits.size(0) && rows.size(1) * 8 == static_cast<int64_t>(sizeof(punica::SampleRow)) &&
                      reinterpret_cast<uintptr_t>(rows.data_ptr()) % alignof(punica::SampleRow) == 0,
                  "rows must be contiguous int64 [", logits.size(0), ", 4] on 16 bytes");
  params.rows = static_cast<punica::SampleRow const*>(rows.data_ptr());
  launch(logits, params, "sample_tokens");
}

void greedy_tokens(Tensor token_ids, Tensor finite, Tensor logits) {
  torch::stable::accelerator::DeviceGuard const guard(logits.get_device_index());
  launch(logits, make_params(token_ids, finite, logits), "greedy_tokens");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(punica, CUDA, library) {
  library.impl("sample_tokens", TORCH_BOX(&sample_tokens));
  library.impl("greedy_tokens", TORCH_BOX(&greedy_tokens));
}
