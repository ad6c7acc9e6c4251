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

// Every lane rates one way to cut: waves times the units of an item, with what an item costs beside them in units. An item
// should have a unit for each warp, were every tile to have one share.
__device__ inline Cut make_cut(ExpandParams const& params, int num_shares) {
  constexpr int kItemOverhead = 4;
  constexpr int kCostBits = 26;
  int const units = params.unit_end[params.tables.slices - 1];
  int const most = max(1, (units + kExpandWarps - 1) / kExpandWarps);
  int const lane = threadIdx.x % 32;
  int const items = max(1, most * (lane + 1) / 32);
  unsigned const waves = (num_shares * items + gridDim.x - 1) / gridDim.x;
  unsigned const cost = waves * ((units + items - 1) / items + kItemOverhead);
  unsigned const best = warp_min(min(cost, (1u << kCostBits) - 1) << 5 | lane) & 31;
  return {units, max(1, most * (static_cast<int>(best) + 1) / 32)};
}

// `tile` has been loaded for the item; its record is loaded here.
__device__ inline ExpandItem make_item(ExpandParams const& params, Cut const& cut, int4 tile, int index) {
  ExpandItem item;
  item.tile = tile;
  int const shares = tile.w >> 16;
  unsigned const piece = (tile.w & 0xffff) * cut.items_a_share + index % cut.items_a_share;
  unsigned const pieces = shares * cut.items_a_share;
  item.first_unit = cut.units * piece / pieces;
  item.end_unit = cut.units * (piece + 1) / pieces;
  item.slice = 0;
  while (item.slice + 1 < params.tables.slices && params.unit_end[item.slice] <= item.first_unit) ++item.slice;
  item.record = load_record(params.tables, item.slice, tile.z);
  return item;
}

}  // namespace punica
