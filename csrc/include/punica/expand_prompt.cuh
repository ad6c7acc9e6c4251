// lora_expand for steps of many rows: bandwidth goes to y, which streams through two register buffers of 16 rows. The first
// chunk of a unit's weights stays in registers while all rows of the tile pass, others come from the L1 cache.
#pragma once

#include "punica/part.cuh"

namespace punica {

constexpr int kPromptTiles = 2;               // row tiles of 8 rows
constexpr int kPromptRows = 8 * kPromptTiles;  // rows of a buffer

// 16 rows from `row` on of one unit. The unit's output is in `y`.
template <typename T, bool kAligned>
__device__ inline void expand_rows(Part<T> const& part, Affine<T> const& affine, int64_t y_stride,
                                   WeightChunk const& weights, T const* hidden, Vec8 const (&y)[kPromptTiles][2], int pack,
                                   int unit_of_pack, int row) {
  float acc[4][kPromptTiles][4] = {};
  Vec8 rows[kPromptTiles];
  load_hidden<T, kPromptTiles>(rows, hidden, part, row, 0, unit_of_pack);
  multiply<T, kPromptTiles>(acc, weights, rows);
#pragma unroll 1
  for (int chunk = 1; chunk < part.chunks; ++chunk) {
    WeightChunk const more = part.template load<kAligned>(pack, chunk);
    load_hidden<T, kPromptTiles>(rows, hidden, part, row, chunk, 0);
    multiply<T, kPromptTiles>(acc, more, rows);
  }
  int const unit = part.first_unit + (pack << part.log2_pack) + unit_of_pack;
  store_output<T, kPromptTiles, kAligned>(acc, y, part, affine, y_stride, unit, row);
}

template <typename T, bool kAligned>
__device__ inline void expand_prompt_part(Part<T> const& part, Affine<T> const& affine, HiddenSource const& source,
                                          int64_t y_stride, T* hidden, bool& must_wait) {
  int const packs = part.num_packs();
  int pack = Part<T>::first_pack();
  WeightChunk weights = part.template load<kAligned>(pack, 0);
  if (must_wait) wait_for_previous();
  must_wait = false;
  int const first_unit = part.first_unit + (pack << part.log2_pack);
  Vec8 upper[kPromptTiles][2];
  Vec8 lower[kPromptTiles][2];
  load_output<T, kPromptTiles, kAligned>(upper, part, y_stride, first_unit, 0);
  load_output<T, kPromptTiles, kAligned>(lower, part, y_stride, first_unit, kPromptRows);
  __syncthreads();  // the part before has been read
  gather_hidden<4>(hidden, source, part, round_up(part.row_count, kPromptRows));
  __syncthreads();
#pragma unroll 1
  for (; pack < packs; pack += kExpandWarps) {
#pragma unroll 1
    for (int p = 0; p < 1 << part.log2_pack; ++p) {
      int const unit = part.first_unit + (pack << part.log2_pack) + p;
      bool const last_of_pack = p + 1 == 1 << part.log2_pack;
      int const next_unit = last_of_pack ? part.first_unit + ((pack + kExpandWarps) << part.log2_pack) : unit + 1;
#pragma unroll 1
      for (int row = 0; row < part.row_count; row += 2 * kPromptRows) {
        bool const more = row + 2 * kPromptRows < part.row_count;
        int const from_unit = more ? unit : next_unit;
        int const from_row = more ? row + 2 * kPromptRows : 0;
        expand_rows<T, kAligned>(part, affine, y_stride, weights, hidden, upper, pack, p, row);
        load_output<T, kPromptTiles, kAligned>(upper, part, y_stride, from_unit, from_row);
        if (row + kPromptRows < part.row_count)
          expand_rows<T, kAligned>(part, affine, y_stride, weights, hidden, lower, pack, p, row + kPromptRows);
        load_output<T, kPromptTiles, kAligned>(lower, part, y_stride, from_unit, from_row + kPromptRows);
      }
    }
    weights = part.template load<kAligned>(pack + kExpandWarps, 0);
  }
}

}  // namespace punica
