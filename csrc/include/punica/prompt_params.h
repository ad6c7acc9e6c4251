// Parameters of the kernel that shrinks prompts. No torch here.
#pragma once

#include <cuda.h>

#include "punica/params.h"

namespace punica {

constexpr int kPromptColumns = 64;  // of x and A in a step: 128 bytes, as wide as the copy engine's swizzle
constexpr int kPromptBoxRows = 16;  // of x or A that are copied together
constexpr int kStartElements = 8;  // a row of A starts at a multiple

// x has so many rows for the kernel to take them.
constexpr int kLeastPromptRows = kMaxDecodeRows + 1;

struct PromptParams {
  CUtensorMap x;  // [T, I] in boxes of kPromptBoxRows rows
  CUtensorMap tall_x;  // of kMaxTileRows
  CUtensorMap a;  // see ArenaMatrix
  CUtensorMap tall_a;
  ShrinkParams shrink;
  int64_t a_shift;  // elements from where the matrix starts to the arena
};

// The arena as a matrix [I / kStartElements, rows, kPromptColumns]: element c of row r from start s on is I r + kStartElements s + c elements behind its begin. The rows of
// an A lie behind one another wherever it starts. It ends where the arena ends, so a box may hold what lies behind an A, but nothing behind the arena.
struct ArenaMatrix {
  int64_t rows;
  int64_t shift;

  ArenaMatrix(int64_t elements, int in_features) {
    int64_t const whole = elements / kStartElements * kStartElements;
    int64_t const behind = kPromptColumns - kStartElements;
    rows = whole > behind ? (whole - behind + in_features - 1) / in_features : 1;
    shift = rows * in_features + behind - whole;
  }
};

// Whether the kernel takes the step. It sums, so nobody may expect parts, and its blocks would be in the way of a product beside them.
inline bool takes_prompt(ShrinkParams const& params, LaunchConfig const& config) {
  int const num_rows = params.scratch.num_rows;
  bool const aligned = params.x_stride % 8 == 0 && (reinterpret_cast<uintptr_t>(params.x) | reinterpret_cast<uintptr_t>(params.tables.arena)) % 16 == 0;
  bool const fits = config.hopper && num_rows >= kLeastPromptRows;
  return fits && aligned && params.in_features > 0 && params.in_features % kPromptColumns == 0 && params.scratch.summed && !params.beside;
}

// What a step is shrunk in: none if the GPU has no room for a cluster. Parts of a GPU may have too few multiprocessors that lie together.
struct PromptClusters {
  int blocks;  // of a cluster
  int count;
};

template <typename T>
PromptClusters prompt_clusters(Scratch const& scratch, LaunchConfig const& config);

// If there are clusters.
template <typename T>
cudaError_t launch_prompt(PromptParams const& params, LaunchConfig const& config);

}  // namespace punica
