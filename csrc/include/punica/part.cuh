// What a block of lora_expand works on: some columns of one slice for one tile of rows.
#pragma once

#include "punica/columns.cuh"
#include "punica/expand_items.cuh"

namespace punica {

constexpr int kHiddenPitch = kMaxRank + 8;  // of the shared low-rank rows: without bank conflicts

// Units [first_unit, end_unit) of one slice for one tile.
//
// A quad of lanes loads 32 elements of K at once. Matrices of lora_rank up to 16 would leave half of the lanes idle, so where rows are few
// a quad loads a pack of two units, or of four.
template <typename T>
struct Part {
  int row_count;
  int lora_rank;
  int width;  // O of the slice
  int first_unit;
  int end_unit;
  int chunks;     // of K
  int log2_pack;  // units of a pack
  int pitch;      // of B
  float scale;
  T const* b;  // of the slice
  T* y;        // of the slice, in row 0 of the tile

  // Which unit of a pack the lane loads, and the first element of K within a chunk.
  __device__ int lane_unit() const { return threadIdx.x % 4 >> (2 - log2_pack); }
  __device__ int lane_k() const { return (threadIdx.x % 4 & ((4 >> log2_pack) - 1)) * 8; }
};

// The fp32 sums of a part's rows: row t of split k starts at v + t * row_pitch + k * split_pitch.
struct HiddenSource {
  float const* v;
  int row_pitch;
  int64_t split_pitch;
  int splits;
};

}  // namespace punica
