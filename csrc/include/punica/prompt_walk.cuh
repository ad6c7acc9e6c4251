// What the blocks of a cluster work on in prompt_shrink.cuh: tiles of rows with the low ranks of all slices, and steps of columns.
#pragma once

#include "punica/prompt_params.h"
#include "punica/tile.cuh"

namespace punica {

constexpr int kGroupRanks = 16;

// Sixteen low ranks of one slice, of which those below lora_rank exist.
struct RankGroup {
  int slice;
  int rank_start;
  int lora_rank;
  int64_t a_offset;
};

// A tile of rows, and what its adapter has in each slice.
struct PromptTile {
  int4 rows;  // row_start, row_count, slot
  int lora_rank[kMaxSlices];
  int64_t a_offset[kMaxSlices];

  __device__ int num_groups() const {
    int count = 0;
#pragma unroll
    for (int slice = 0; slice < kMaxSlices; ++slice) count += (lora_rank[slice] + kGroupRanks - 1) / kGroupRanks;
    return count;
  }
  __device__ RankGroup group(int index) const {
    RankGroup out{};
    int first = 0;
#pragma unroll
    for (int slice = 0; slice < kMaxSlices; ++slice) {
      int const end = first + (lora_rank[slice] + kGroupRanks - 1) / kGroupRanks;
      if (index >= first && index < end) out = {slice, (index - first) * kGroupRanks, lora_rank[slice], a_offset[slice]};
      first = end;
    }
    return out;
  }
};

// The way of a cluster of kBlocks blocks through the tiles of the step.
template <int kBlocks>
class PromptWalk {
 public:
  __device__ explicit PromptWalk(Tables const& tables)
      : tables_(tables), list_(load_metadata(reinterpret_cast<int4 const*>(tables.plan + kNumTiles))), next_(blockIdx.x / kBlocks) {
    look_ahead();
    advance();
  }

  // Loads the next tile, so that nobody waits for it later.
  __device__ void look_ahead() {
    ahead_ = {};
    if (next_ >= list_.x) return;
    ahead_.rows = load_item(tables_.plan, list_.y, next_);
#pragma unroll
    for (int slice = 0; slice < kMaxSlices; ++slice) {
      if (slice >= tables_.slices) continue;
      TableRecord const record = load_record(tables_, slice, ahead_.rows.z);
      ahead_.lora_rank[slice] = record.lora_rank;
      ahead_.a_offset[slice] = record.a_offset;
    }
  }
  __device__ void advance() {
    tile_ = ahead_;
    done_ = next_ >= list_.x;
    next_ += gridDim.x / kBlocks;
  }
  __device__ bool done() const { return done_; }
  __device__ PromptTile const& tile() const { return tile_; }

 private:
  Tables const& tables_;
  int4 list_;
  int next_;
  bool done_;
  PromptTile tile_;
  PromptTile ahead_;
};

// Steps of 64 columns: first, first + kBlocks, ...
template <int kBlocks>
struct PromptSteps {
  int first;
  int count;

  __device__ PromptSteps(int in_features, int block) : first(block) {
    int const all = (in_features + kPromptColumns - 1) / kPromptColumns;
    count = (all - block + kBlocks - 1) / kBlocks;
  }
  __device__ int column(int index) const { return (first + index * kBlocks) * kPromptColumns; }
};

}  // namespace punica
