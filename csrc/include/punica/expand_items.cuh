// How lora_expand cuts the shares of the plan into items, one a block at a time.
#pragma once

#include "punica/tile.cuh"

namespace punica {

constexpr int kExpandWarps = 4;
constexpr int kExpandThreads = 32 * kExpandWarps;

// A share of a tile cut into items: units [first_unit, end_unit) of the group's slices together.
struct ExpandItem {
  int4 tile;  // row_start, row_count, slot, share | shares << 16
  TableRecord record;  // of the slice that first_unit lies in
  int slice;
  int first_unit;
  int end_unit;
};

// How all shares are cut.
struct Cut {
  int units;          // of the group
  int items_a_share;  // the same for every share
};

// Every share is cut into as many items as fill the grid once, or up to eight times where that leaves fewer blocks idle: lane k rates k + 1 waves by
// the rounds that a block makes over the packs of its items, and one more for each item. Items have a pack for each warp, in rounds as full as can be;
// counted for the tile that has the fewest shares.
template <int kWarps>
__device__ inline Cut make_cut(ExpandParams const& params, WorkList const& work) {
  constexpr int kMostWaves = 8;
  constexpr int kCostBits = 26;
  int const units = params.unit_end[params.tables.slices - 1];
  int const shares = max(1, work.num_shares);
  int const least = max(1, work.least_shares);
  int const blocks = gridDim.x;
  int const round = least * kWarps * (least == 1 ? 2 : 1);  // units of a round; such tiles have packs of two units
  int const wanted = max(1, quotient((static_cast<int>(threadIdx.x) % kMostWaves + 1) * blocks, shares));
  int const rounds = quotient(units + round * wanted - 1, round * wanted);
  int const items = quotient(units + round * rounds - 1, round * rounds);
  unsigned const cost = quotient(shares * items + blocks - 1, blocks) * (rounds + 1);
  unsigned const best = warp_min(min(cost, (1u << kCostBits) - 1) << 5 | threadIdx.x % kMostWaves) & 31;
  return {units, shuffle(items, static_cast<int>(best))};
}

// The item from slice `first_slice` on, if it reaches that far. Its record is loaded here.
__device__ inline ExpandItem make_item(ExpandParams const& params, WorkList const& work, Cut const& cut, int index, int first_slice) {
  ExpandItem item;
  int const share = quotient(index, cut.items_a_share);
  item.tile = load_item(params.tables.plan, work.shares_offset, share);
  int const pieces = (item.tile.w >> 16) * cut.items_a_share;
  int const piece = (item.tile.w & 0xffff) * cut.items_a_share + index - share * cut.items_a_share;
  int const least = quotient(cut.units, pieces);
  int const longer = cut.units - least * pieces;  // the first so many have one more
  item.first_unit = piece * least + min(piece, longer);
  item.end_unit = item.first_unit + least + (piece < longer);
  item.slice = first_slice;
  if (first_slice > 0) item.first_unit = params.unit_end[first_slice - 1];
  while (item.slice + 1 < params.tables.slices && params.unit_end[item.slice] <= item.first_unit) ++item.slice;
  item.record = load_record(params.tables, item.slice, item.tile.z);
  return item;
}

}  // namespace punica
