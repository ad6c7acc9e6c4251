// Parameters of the kernels: raw pointers, strides in elements. No torch here.
// The twin of punica_core/ops/layout.py.
//
// Dims: T rows in the step, N slots, R lora_rank, I / O in / out features.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

namespace punica {

constexpr int kMaxSlices = 4;
constexpr int kRowAlignment = 8;       // elements: B rows and every matrix start on 16 bytes
constexpr int kShrinkChunkShort = 16;  // lora_rank columns of a shrink unit of a segment of at most 8 rows
constexpr int kMaxRank = 256;
constexpr int kMaxTileRows = 64;
constexpr int kExpandColumns = 256;    // output columns of one expand item

// One slice of one slot. Offsets are elements of the arena.
struct alignas(16) TableRecord {
  int64_t a_offset;     // A [R, I], row pitch I; for lora_embed [V, R]
  int64_t b_offset;     // B [O, R], row pitch round_up(R, 8); for segment_gemm W [O, I], row pitch round_up(I, 8)
  int64_t gain_offset;  // [O] or -1
  int64_t bias_offset;  // [O] or -1
  int32_t lora_rank;    // 0: the module is not adapted
  float scale;
  int64_t reserved;
};
static_assert(sizeof(TableRecord) == 48);

// Words of the plan's header; offsets in words from its start.
enum PlanHeader : int {
  kNumSegments = 0,
  kNumRows = 1,
  kIndptrOffset = 2,
  kSlotOffset = 3,
  kNumShrinkUnits = 4,
  kShrinkOffset = 5,
  kNumExpandTiles = 6,
  kExpandOffset = 7,
};

// What all kernels share.
struct Tables {
  void const* arena;         // [elements] of the kernel's dtype, 16-byte aligned
  TableRecord const* table;  // [slices, N]
  int32_t const* plan;       // [capacity]
  int slices;
  int num_slots;
};

// fp32 partial sums [max_splits, T, slices, max_rank]; split_target and max_splits decide how many splits are used.
struct Scratch {
  float* v;
  int num_rows;
  int max_rank;      // multiple of 8
  int max_splits;    // how many fit
  int split_target;  // work items that fill the GPU
};

struct LaunchConfig {
  int num_sms;
  bool dependent_launch;  // programmatic dependent launch: sm_90 and newer
  cudaStream_t stream;
};

struct ShrinkParams {
  Tables tables;
  Scratch scratch;
  void const* x;  // [T, I]
  int64_t x_stride;
  int in_features;
};

struct EmbedParams {
  Tables tables;
  Scratch scratch;
  void const* token_ids;  // [T]
  bool ids_are_64_bit;
};

struct ExpandParams {
  Tables tables;
  Scratch scratch;
  void* y;  // [T, sum of widths]
  int64_t y_stride;
  int in_features;            // of the shrink that filled the scratch
  int widths[kMaxSlices];     // O of each slice
  int columns[kMaxSlices];    // first column of each slice
  int chunk_end[kMaxSlices];  // items of kExpandColumns columns up to and including each slice
};

struct SegmentGemmParams {
  Tables tables;
  void const* x;  // [T, I]
  void* y;        // [T, O]
  int64_t x_stride;
  int64_t y_stride;
  int in_features;
  int out_features;
};

template <typename T>
cudaError_t launch_shrink(ShrinkParams const& params, LaunchConfig const& config);
template <typename T>
cudaError_t launch_embed(EmbedParams const& params, LaunchConfig const& config);
template <typename T>
cudaError_t launch_expand(ExpandParams const& params, LaunchConfig const& config);
template <typename T>
cudaError_t launch_segment_gemm(SegmentGemmParams const& params, LaunchConfig const& config);

// Splits of the in_features axis that shrink writes and expand sums. Both call this, so it may depend only on what both
// know. A split is at least 512 columns: one step of each of the 8 warps of a block.
__host__ __device__ inline int split_count(Scratch const& scratch, int num_units, int slices, int in_features) {
  int const work = num_units * slices;
  int splits = work > 0 ? scratch.split_target / work : 1;
  int const longest = (in_features + 511) / 512;
  splits = splits < longest ? splits : longest;
  splits = splits < scratch.max_splits ? splits : scratch.max_splits;
  return splits > 1 ? splits : 1;
}

}  // namespace punica
