// Matrices as the copy engine wants them described.
#pragma once

#include <cuda.h>

#include "bindings.h"

namespace punica {

// The driver's, without linking to it.
inline decltype(&cuTensorMapEncodeTiled) map_encoder() {
  static auto const found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    cudaError_t const error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
#else
    cudaError_t const error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? function : nullptr;
  }();
  STD_TORCH_CHECK(found != nullptr, "the CUDA driver has no cuTensorMapEncodeTiled");
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
}

// Of a matrix with contiguous rows that start on 16 bytes, in boxes of 128 bytes by `box_rows`, swizzled by 128 bytes.
inline CUtensorMap make_map(torch::stable::Tensor const& matrix, int box_columns, int box_rows) {
  CUtensorMap map{};
  auto const dtype = matrix.scalar_type() == torch::headeronly::ScalarType::BFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  cuuint64_t const sizes[] = {static_cast<cuuint64_t>(matrix.size(1)), static_cast<cuuint64_t>(matrix.size(0))};
  cuuint64_t const strides[] = {static_cast<cuuint64_t>(matrix.stride(0)) * 2};
  cuuint32_t const box[] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)};
  cuuint32_t const steps[] = {1, 1};
  CUresult const result = map_encoder()(&map, dtype, 2, matrix.data_ptr(), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  STD_TORCH_CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled failed with ", static_cast<int>(result));
  return map;
}

}  // namespace punica
