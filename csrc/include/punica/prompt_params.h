// Parameters of the kernel that shrinks prompts. No torch here.
#pragma once

#include <cuda.h>

#include "punica/params.h"

namespace punica {

constexpr int kPromptColumns = 64;      // of x in a step: 128 bytes, as wide as the copy engine's swizzle
constexpr int kPromptBoxRows = 16;      // of x that are copied together
constexpr int kPromptClusterBlocks = 8;

struct PromptParams {
  CUtensorMap x;  // [T, I] in boxes of kPromptBoxRows rows
  ShrinkParams shrink;
};

// Whether the kernel takes the step. It sums, so nobody may expect parts, and its blocks would be in the way of a product beside them.
inline bool takes_prompt(ShrinkParams const& params, LaunchConfig const& config) {
  bool const aligned = params.in_features % 8 == 0 && params.x_stride % 8 == 0 && reinterpret_cast<uintptr_t>(params.x) % 16 == 0;
  bool const fits = config.hopper && params.scratch.num_blocks >= kPromptClusterBlocks;
  return fits && aligned && params.in_features > 0 && params.scratch.num_rows > kMaxDecodeRows && params.scratch.summed && !params.beside;
}

template <typename T>
cudaError_t launch_prompt(PromptParams const& params, LaunchConfig const& config);

}  // namespace punica
