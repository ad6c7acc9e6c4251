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

// In boxes whose rows are 128 bytes, swizzled by 128 bytes. The first of sizes and box is that of the elements that lie together, and has no stride.
template <int kDims>
CUtensorMap encode_map(torch::headeronly::ScalarType dtype, void* pointer, cuuint64_t const (&sizes)[kDims], cuuint64_t const (&strides)[kDims - 1],
                       cuuint32_t const (&box)[kDims]) {
  CUtensorMap map{};
  auto const type = dtype == torch::headeronly::ScalarType::BFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  cuuint32_t const steps[] = {1, 1, 1};
  static_assert(kDims <= 3);
  CUresult const result = map_encoder()(&map, type, kDims, pointer, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  STD_TORCH_CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled failed with ", static_cast<int>(result));
  return map;
}

// Of a matrix with contiguous rows that start on 16 bytes, in boxes of 128 bytes by `box_rows`.
inline CUtensorMap make_map(torch::stable::Tensor const& matrix, int box_columns, int box_rows) {
  cuuint64_t const sizes[] = {static_cast<cuuint64_t>(matrix.size(1)), static_cast<cuuint64_t>(matrix.size(0))};
  cuuint64_t const strides[] = {static_cast<cuuint64_t>(matrix.stride(0)) * 2};
  cuuint32_t const box[] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)};
  return encode_map<2>(matrix.scalar_type(), matrix.data_ptr(), sizes, strides, box);
}

}  // namespace punica
