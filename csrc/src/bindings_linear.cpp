// The binding of linear_few, whose schema and documentation are in punica_core/ops/__init__.py.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <optional>

#include "bindings.h"
#include "punica/linear_params.h"

namespace {

using punica::to_int;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check_rows(char const* name, Tensor const& rows, int64_t width, Tensor const& weight) {
  STD_TORCH_CHECK(rows.dim() == 2 && rows.size(0) <= punica::kLinearRows && rows.size(1) == width && rows.stride(1) == 1 &&
                      rows.scalar_type() == weight.scalar_type(),
                  name, " must be [at most ", punica::kLinearRows, ", ", width, "] of the weight's dtype, its rows contiguous");
}

void linear_few(Tensor y, Tensor x, Tensor weight, std::optional<Tensor> bias) {
  torch::stable::accelerator::DeviceGuard const guard(weight.get_device_index());
  STD_TORCH_CHECK(weight.scalar_type() == ScalarType::BFloat16 || weight.scalar_type() == ScalarType::Half,
                  "the CUDA kernel takes bfloat16 and float16");
  STD_TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && weight.size(1) % 8 == 0 &&
                      reinterpret_cast<uintptr_t>(weight.data_ptr()) % 16 == 0,
                  "weight must be contiguous [O, I] on 16 bytes, I a multiple of 8");
  check_rows("x", x, weight.size(1), weight);
  check_rows("y", y, weight.size(0), weight);
  STD_TORCH_CHECK(x.size(0) == y.size(0) && x.stride(0) % 8 == 0 && reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0,
                  "x must have y's rows, which start on 16 bytes");
  punica::LinearParams params{};
  params.x = x.data_ptr();
  params.weight = weight.data_ptr();
  params.y = y.data_ptr();
  if (bias.has_value()) {
    STD_TORCH_CHECK(bias->dim() == 1 && bias->is_contiguous() && bias->size(0) == weight.size(0) &&
                        bias->scalar_type() == weight.scalar_type(),
                    "bias must be contiguous [O] of the weight's dtype");
    params.bias = bias->data_ptr();
  }
  params.x_stride = x.stride(0);
  params.y_stride = y.stride(0);
  params.num_rows = to_int(x.size(0));
  params.in_features = to_int(weight.size(1));
  params.out_features = to_int(weight.size(0));
  auto const launch = weight.scalar_type() == ScalarType::BFloat16 ? punica::launch_linear_few<__nv_bfloat16>
                                                                   : punica::launch_linear_few<__half>;
  punica::check_cuda(launch(params, punica::launch_config(weight)), "linear_few");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(punica, CUDA, library) { library.impl("linear_few", TORCH_BOX(&linear_few)); }
