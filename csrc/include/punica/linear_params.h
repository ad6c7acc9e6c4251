// Parameters of the kernel that computes a linear layer of few rows with all adapters. No torch here.
#pragma once

#include <cuda.h>

#include <algorithm>

#include "punica/params.h"

namespace punica {

constexpr int kLinearBox = 64;       // elements of K in a box of the copy engine: 128 bytes, as wide as its swizzle
constexpr int kMaxLinearStages = 12;
constexpr int kLinearSharedBytes = 208 * 1024;  // beside what is declared
constexpr int kMaxLinearHeight = 256;
constexpr int kLinearTileRows = 64;  // output columns of a warpgroup's product

// How the work is cut: a cluster of `splits` blocks has `height` output columns, and each block a part of K.
struct LinearTile {
  int rows;    // of the step that fit: 8, 16, 32, 64 or 128
  int height;  // a multiple of 16 splits
  int splits;  // 1, 2, 4 or 8
  int boxes;   // of K in a stage, 1 or 2
  int stages;  // of the ring, at most: as few as keep memory busy, as what is on its way delays all other loads
};

struct LinearParams {
  CUtensorMap weight;   // [O, I] in boxes of `height` rows
  CUtensorMap x;        // [T, I] in boxes of box_rows() rows
  ShrinkParams shrink;
  void const* bias;     // [O] or nullptr
  void* y;              // [T, O]
  int64_t y_stride;
  LinearTile tile;
  int stages;
  int num_rows;
  int out_features;
  int num_steps;  // of K, each as long as a stage
  int widths[kMaxSlices];
  int columns[kMaxSlices];

  // Products of 64 columns that a block computes: as many as there are kernels for.
  __host__ __device__ int num_parts() const {
    int const parts = (tile.height + kLinearTileRows - 1) / kLinearTileRows;
    return parts > 2 ? 4 : parts;
  }
  __host__ __device__ int stage_bytes() const { return tile.boxes * (tile.height + tile.rows) * 2 * kLinearBox; }
  // Rows of x that come into a stage: products read more, and what they make of them is not stored.
  __host__ __device__ int box_rows() const { return (num_rows + 7) / 8 * 8; }
  __host__ __device__ int copied_bytes() const { return tile.boxes * (tile.height + box_rows()) * 2 * kLinearBox; }
  __host__ __device__ int ring_bytes() const { return stages * stage_bytes(); }
  // A block's share of the tile's columns.
  __host__ __device__ int num_columns() const { return tile.height / tile.splits; }
  // What the other blocks of the cluster send to a block: their sums of its columns.
  __host__ __device__ int mail_bytes() const { return (tile.splits - 1) * tile.rows * num_columns() * 4; }
  // Whether that comes into the ring, when all blocks of the cluster have read theirs; else behind it, where sums may come as soon as a block has begun.
  __host__ __device__ bool meets_in_ring() const { return tile.splits == 1 || tile.rows > 64; }
  // The block's part of y, in the ring too, behind what may come there: rows without bank conflicts.
  __host__ __device__ static int out_pitch(int columns) { return 2 * columns + 16; }
  __host__ __device__ int out_offset() const { return meets_in_ring() ? mail_bytes() : 0; }
};

// Sets what follows from the tile: blocks, steps of K, and how many stages the ring has. Returns bytes of shared memory that a block asks for, 0 if the tile does not fit. max_rank: bound of every lora_rank.
inline int fit_tile(LinearParams& params, int max_rank) {
  LinearTile const& tile = params.tile;
  int const step = tile.boxes * kLinearBox;
  params.num_steps = (params.shrink.in_features + step - 1) / step;
  params.shrink.scratch.num_blocks = (params.out_features + tile.height - 1) / tile.height * tile.splits;
  // Warpgroups read whole tiles of 64 columns, of which the last ones may lie in what follows.
  int const behind = (params.num_parts() * kLinearTileRows - tile.height) * 2 * kLinearBox;
  int const beyond = std::max(params.meets_in_ring() ? 0 : params.mail_bytes(), behind);
  int const alignment = 1024;
  params.stages = std::min({tile.stages, kMaxLinearStages, (kLinearSharedBytes - alignment - beyond) / params.stage_bytes()});
  // Eight low-rank rows, and sixteen columns of B.
  int const least = max_rank * 2 * (8 * params.shrink.tables.slices + 16);
  if (params.stages < 2 || params.stage_bytes() < least) return 0;
  if (params.out_offset() + tile.rows * params.out_pitch(params.num_columns()) > params.ring_bytes()) return 0;
  return alignment + params.ring_bytes() + beyond;
}

template <typename T>
cudaError_t launch_linear(LinearParams const& params, int shared_bytes, LaunchConfig const& config);

}  // namespace punica
