// Parameters of linear_few: raw pointers, strides in elements. No torch here.
#pragma once

#include "punica/params.h"

namespace punica {

constexpr int kLinearRows = 8;  // most rows of x

struct LinearParams {
  void const* x;       // [T, I], rows contiguous
  void const* weight;  // [O, I], contiguous
  void const* bias;    // [O] or null
  void* y;             // [T, O], rows contiguous
  int64_t x_stride;
  int64_t y_stride;
  int num_rows;     // T
  int in_features;  // I, a multiple of 8
  int out_features;
};

template <typename T>
cudaError_t launch_linear_few(LinearParams const& params, LaunchConfig const& config);

}  // namespace punica
