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
constexpr int kMaxDecodeRows = 256;  // steps of more rows are mostly prompts
constexpr int kMaxTileRows = 64;
constexpr int kWarpColumns = 64;       // output columns of a warp's tile

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
  kNumExpandShares = 6,
  kExpandOffset = 7,
  kLeastShares = 8,  // of a tile
  kRankPitch = 9,    // elements between two slices of what shrink leaves
  kNumBlanks = 10,   // tiles of rows without lora_rank
  kBlankOffset = 11,
  kNumTiles = 12,  // of adapted rows, as high as can be
  kTileOffset = 13,
};

constexpr int kHeaderWords = 16;

// The last words of a plan are counters, zero between kernels: of the splits that are done of a shrink unit in one slice.
constexpr int kNumCounters = 4096;
constexpr int kNumUnitCounters = kNumCounters - 4;  // the others are those of linear_shrink.cuh

// Blocks a multiprocessor. Steps of very few rows leave room for the next kernel's blocks, which then prepare while this one runs.
inline int shrink_blocks_per_sm(int num_rows) { return num_rows <= 16 ? 1 : 2; }

// What all kernels share.
struct Tables {
  void const* arena;         // [elements] of the kernel's dtype, 16-byte aligned
  TableRecord const* table;  // [slices, N], strides below
  int32_t const* plan;       // [capacity]
  int slices;
  int slice_stride;  // records
  int slot_stride;
};

// What shrink leaves. Either the low-rank rows [T, slices, rank pitch of the plan], of the arena's dtype and zero from lora_rank to the next multiple
// of 8, with partial sums behind them that no other kernel reads; or, if they are not `summed`, only the partial sums. There is room for max_rank in
// place of the pitch, so that the room does not depend on who takes part in a step and what is moved does.
struct Scratch {
  void* hidden;
  float* parts;    // [splits, T, slices, rank pitch]; split_count() says how many splits are used
  int* counters;   // [kNumCounters]
  int num_rows;
  int max_splits;  // how many fit
  int num_blocks;  // of shrink: work items that run at once
  int max_rank;
  bool summed;
};

struct LaunchConfig {
  int num_sms;
  bool dependent_launch;  // programmatic dependent launch: sm_90 and newer
  cudaStream_t stream;
  bool hopper = false;  // compute capability 9.0: kernels for sm_90a run
  int device = 0;
};

struct ShrinkParams {
  Tables tables;
  Scratch scratch;
  void const* x;  // [T, I]
  int64_t x_stride;
  int in_features;
  bool beside;  // the next kernel may run beside this one, but not before the one before has ended
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
  int in_features;           // of the shrink that filled the scratch
  int widths[kMaxSlices];    // O of each slice
  int columns[kMaxSlices];   // first column of each slice
  int unit_end[kMaxSlices];  // units of kWarpColumns columns up to and including each slice
  bool overwrite;            // y becomes what the adapters add, zero where none does; gain and bias are not applied
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

struct KvAppendParams {
  void const* key;    // [T, K, D], elements of a head contiguous
  void const* value;  // likewise
  void* keys;         // the layer's keys in block 0: [blocks, P, K, D], strided between blocks
  void* values;       // likewise
  int32_t const* kv_slots;  // [T]: block_id * P + offset, or negative: nothing is written
  int64_t key_row_stride;
  int64_t key_head_stride;
  int64_t value_row_stride;
  int64_t value_head_stride;
  int64_t block_stride;
  int64_t token_stride;
  int num_rows;
  int num_heads;
  int head_dim;  // a multiple of 8
  int block_size;
};

template <typename T>
cudaError_t launch_shrink(ShrinkParams const& params, LaunchConfig const& config);
template <typename T>
cudaError_t launch_embed(EmbedParams const& params, LaunchConfig const& config);
template <typename T>
cudaError_t launch_expand(ExpandParams const& params, LaunchConfig const& config);
template <typename T>
cudaError_t launch_segment_gemm(SegmentGemmParams const& params, LaunchConfig const& config);
template <typename T>
cudaError_t launch_kv_append(KvAppendParams const& params, LaunchConfig const& config);

}  // namespace punica
