// A step's plan, built on the host: segments, then the work lists that the kernels walk. No torch here.
// The twin of punica_core/ops/plan.py, bit for bit.
#pragma once

#include <algorithm>
#include <cstdint>

#include "punica/params.h"

namespace punica {

constexpr int kItemWords = 4;
constexpr int kShrinkChunkTall = 32;   // lora_rank columns of a shrink unit of any longer segment
constexpr int kShareBytes = 64;        // that an output column of an expand share moves
constexpr int kShortRows = 8;          // heights of tiles
constexpr int kMiddleRows = 16;        // at most, in steps of few rows: more tiles for the whole GPU to work on
constexpr int kShortSegment = 32;      // rows of the longest segment that is cut into short tiles
constexpr int kManyUnits = 32;         // short shrink units: with more there is work for the whole GPU without cutting rows for it

enum class PlanError : int {
  kNone = 0,
  kRank,      // value: the largest lora_rank of the step
  kSlot,      // value: a slot that the table does not have
  kOrder,     // seg_indptr does not start at 0, or decreases; value: which
  kCapacity,  // the plan does not fit; value: words that it has
  kSegments,  // more segments than allowed; value: how many
};

struct PlanResult {
  PlanError error;
  int64_t value;  // without error: words written
};

namespace detail {

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// many: see has_many_units. Up to kShrinkChunkShort ranks a tile of expand has two units of columns if it is short.
inline int tile_height(int rows, int rank, int step_rows, bool many) {
  if (rows <= (many && rank > kShrinkChunkShort ? kShortRows : kShortSegment)) return kShortRows;
  return step_rows <= kMaxDecodeRows ? kMiddleRows : kMaxTileRows;
}

inline int shares_of(int rank, int rows) {
  return ceil_div((rank + 7) / 8 * 16 + std::min(rows, kMiddleRows) * 4, kShareBytes);
}

enum class Tiles {
  kCut,    // of adapted segments, cut for the number of rows
  kWhole,  // of adapted segments, as high as can be
  kBlank,  // of the others
};

// Calls visit(segment, row_start, rows, height, lora_rank) for every such tile in order.
template <typename Visit>
void for_each_tile(int32_t const* indptr, int32_t const* slots, int num_segments, int32_t const* slot_rank, Tiles tiles, bool many, Visit visit) {
  for (int s = 0; s < num_segments; ++s) {
    int const rows = indptr[s + 1] - indptr[s];
    int const rank = slots[s] >= 0 ? slot_rank[slots[s]] : 0;
    if (rank > 0 == (tiles == Tiles::kBlank)) continue;
    int const height = tiles == Tiles::kCut ? tile_height(rows, rank, indptr[num_segments], many) : kMaxTileRows;
    for (int row = 0; row < rows; row += height) visit(s, indptr[s] + row, std::min(height, rows - row), height, rank);
  }
}

// Whether a step of few rows would have many shrink units if its segments of up to kShortSegment rows were cut into short tiles. A tile reads all of an adapter.
inline bool has_many_units(int32_t const* indptr, int32_t const* slots, int num_segments, int32_t const* slot_rank) {
  if (indptr[num_segments] > kMaxDecodeRows) return false;
  int64_t units = 0;
  for (int s = 0; s < num_segments; ++s) {
    int const rows = indptr[s + 1] - indptr[s];
    int const rank = slots[s] >= 0 ? std::max(slot_rank[slots[s]], 0) : 0;
    units += int64_t{ceil_div(rows, kShortRows)} * ceil_div(rank, kShrinkChunkShort);
  }
  return units > kManyUnits;
}

inline int chunk_of(int height) { return height == kShortRows ? kShrinkChunkShort : kShrinkChunkTall; }

}  // namespace detail

// Writes work lists and header behind the segments that already stand in `plan` (indptr at kHeaderWords, slots behind it).
inline PlanResult write_work_lists(int32_t* plan, int64_t capacity, int num_segments, int32_t const* slot_rank,
                                   int64_t num_slots, int max_rank) {
  int32_t const* const indptr = plan + kHeaderWords;
  int32_t const* const slots = indptr + num_segments + 1;
  if (indptr[0] != 0) return {PlanError::kOrder, 0};
  int largest = 0;
  for (int s = 0; s < num_segments; ++s) {
    if (indptr[s + 1] < indptr[s]) return {PlanError::kOrder, s + 1};
    if (slots[s] >= num_slots) return {PlanError::kSlot, slots[s]};
    if (slots[s] >= 0 && indptr[s + 1] > indptr[s]) largest = std::max(largest, slot_rank[slots[s]]);
  }
  if (largest > max_rank) return {PlanError::kRank, largest};
  bool const many = detail::has_many_units(indptr, slots, num_segments, slot_rank);
  int64_t num_shares = 0;
  int64_t num_units = 0;
  int64_t num_blanks = 0;
  int64_t num_tiles = 0;
  int least_shares = 0;
  detail::for_each_tile(indptr, slots, num_segments, slot_rank, detail::Tiles::kCut, many, [&](int, int, int rows, int height, int rank) {
    int const shares = detail::shares_of(rank, rows);
    least_shares = num_shares == 0 ? shares : std::min(least_shares, shares);
    num_shares += shares;
    num_units += detail::ceil_div(rank, detail::chunk_of(height));
  });
  detail::for_each_tile(indptr, slots, num_segments, slot_rank, detail::Tiles::kBlank, many, [&](int, int, int, int, int) { ++num_blanks; });
  detail::for_each_tile(indptr, slots, num_segments, slot_rank, detail::Tiles::kWhole, many, [&](int, int, int, int, int) { ++num_tiles; });
  int const slot_offset = kHeaderWords + num_segments + 1;
  int64_t const expand_offset = (slot_offset + num_segments + kItemWords - 1) / kItemWords * kItemWords;
  int64_t const shrink_offset = expand_offset + num_shares * kItemWords;
  int64_t const blank_offset = shrink_offset + num_units * kItemWords;
  int64_t const tile_offset = blank_offset + num_blanks * kItemWords;
  int64_t const used = tile_offset + num_tiles * kItemWords;
  if (used > capacity) return {PlanError::kCapacity, capacity};
  for (int64_t i = slot_offset + num_segments; i < expand_offset; ++i) plan[i] = 0;
  int32_t* share = plan + expand_offset;
  int32_t* unit = plan + shrink_offset;
  int32_t* blank = plan + blank_offset;
  int32_t* tile = plan + tile_offset;
  auto const put = [&](int32_t*& item, int s, int start, int rows, int32_t word) {
    item[0] = start;
    item[1] = rows;
    item[2] = slots[s];
    item[3] = word;
    item += kItemWords;
  };
  detail::for_each_tile(indptr, slots, num_segments, slot_rank, detail::Tiles::kCut, many, [&](int s, int start, int rows, int height, int rank) {
    int const shares = detail::shares_of(rank, rows);
    for (int i = 0; i < shares; ++i) put(share, s, start, rows, i | shares << 16);
    int const chunk = detail::chunk_of(height);
    for (int first = 0; first < rank; first += chunk) put(unit, s, start, rows, first | chunk << 16);
  });
  detail::for_each_tile(indptr, slots, num_segments, slot_rank, detail::Tiles::kBlank, many,
                        [&](int s, int start, int rows, int, int) { put(blank, s, start, rows, 0); });
  detail::for_each_tile(indptr, slots, num_segments, slot_rank, detail::Tiles::kWhole, many,
                        [&](int s, int start, int rows, int, int) { put(tile, s, start, rows, 0); });
  std::fill_n(plan, kHeaderWords, 0);
  plan[kNumSegments] = num_segments;
  plan[kNumRows] = indptr[num_segments];
  plan[kIndptrOffset] = kHeaderWords;
  plan[kSlotOffset] = slot_offset;
  plan[kNumShrinkUnits] = static_cast<int32_t>(num_units);
  plan[kShrinkOffset] = static_cast<int32_t>(shrink_offset);
  plan[kNumExpandShares] = static_cast<int32_t>(num_shares);
  plan[kExpandOffset] = static_cast<int32_t>(expand_offset);
  plan[kLeastShares] = least_shares;
  plan[kRankPitch] = (largest + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
  plan[kNumBlanks] = static_cast<int32_t>(num_blanks);
  plan[kBlankOffset] = static_cast<int32_t>(blank_offset);
  plan[kNumTiles] = static_cast<int32_t>(num_tiles);
  plan[kTileOffset] = static_cast<int32_t>(tile_offset);
  return {PlanError::kNone, used};
}

// From segments: indptr [S+1], slots [S].
inline PlanResult build_plan(int32_t* plan, int64_t capacity, int32_t const* indptr, int32_t const* slots, int num_segments,
                             int32_t const* slot_rank, int64_t num_slots, int max_rank) {
  if (kHeaderWords + 2 * int64_t{num_segments} + 1 + kItemWords > capacity) return {PlanError::kCapacity, capacity};
  std::copy_n(indptr, num_segments + 1, plan + kHeaderWords);
  std::copy_n(slots, num_segments, plan + kHeaderWords + num_segments + 1);
  return write_work_lists(plan, capacity, num_segments, slot_rank, num_slots, max_rank);
}

// From the slot of each row: equal neighbours are one segment.
inline PlanResult build_row_plan(int32_t* plan, int64_t capacity, int32_t const* row_slots, int num_rows, int64_t max_segments,
                                 int32_t const* slot_rank, int64_t num_slots, int max_rank) {
  int num_segments = 0;
  for (int t = 0; t < num_rows; ++t) num_segments += t == 0 || row_slots[t] != row_slots[t - 1];
  if (num_segments > max_segments) return {PlanError::kSegments, num_segments};
  if (kHeaderWords + 2 * int64_t{num_segments} + 1 + kItemWords > capacity) return {PlanError::kCapacity, capacity};
  int32_t* const indptr = plan + kHeaderWords;
  int32_t* const slots = indptr + num_segments + 1;
  int s = 0;
  for (int t = 0; t < num_rows; ++t) {
    if (t > 0 && row_slots[t] == row_slots[t - 1]) continue;
    indptr[s] = t;
    slots[s++] = row_slots[t];
  }
  indptr[num_segments] = num_rows;
  return write_work_lists(plan, capacity, num_segments, slot_rank, num_slots, max_rank);
}

}  // namespace punica
