// The adapters' products in the kernel of linear.cuh, added to the sums of base products: of what linear_adapters.cuh has brought into the ring.
#pragma once

#include "punica/linear_adapters.cuh"

namespace punica {

#ifdef PUNICA_HOPPER

// Zeroes the elements from `valid` on of four.
__device__ inline void keep_first4(uint2& words, int valid) {
  if (valid <= 0) words.x = 0;
  if (valid == 1) words.x &= 0xffffu;
  if (valid <= 2) words.y = 0;
  if (valid == 3) words.y &= 0xffffu;
}

// The sixteen columns of a warp in each part of the tile, as a lane sees them in a stage: rows of its B.
template <int kParts>
struct LaneColumns16 {
  int column[kParts];  // of the upper eight, the others are eight behind
  bool inside;         // all columns of all lanes are there

  __device__ LaneColumns16(AdapterStage const& stage, int group) : inside(true) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      int const first = group + part * kLinearTileRows - stage.first_column;
      column[part] = first + static_cast<int>(threadIdx.x) % 32 / 4;
      inside = inside && first >= 0 && first + 16 <= stage.num_columns;
    }
  }
  __device__ static bool has(AdapterStage const& stage, int column) { return column >= 0 && column < stage.num_columns; }
};

// d += scale * v B^T of 8 kTiles rows from `tile_row` on for the warp's columns, with all adapters of these rows that the stage has. Every row is of one
// adapter, so each takes part with the others' low-rank rows zeroed. Within sixteen ranks the tensor core may take them in any order: lane q of a quad has 4q .. 4q+3 of
// both operands. Starts at item `first`, whose rows may be before; returns the first that may have later rows.
template <typename T, int kTiles, int kParts, bool kSkips>
__device__ inline int add_rows(AdapterStage const& stage, LaneColumns16<kParts> const& columns, uint32_t items, uint32_t memory, int first, int tile_row,
                               float (&d)[kParts][4 * kTiles]) {
  int const quad = static_cast<int>(threadIdx.x) % 32 / 4;
  int const lane = static_cast<int>(threadIdx.x) % 4;
  bool const plain = columns.inside && stage.whole_ranks != 0;
  uint32_t const hidden = memory + stage.hidden_offset + (tile_row + quad - stage.first_row) * stage.hidden_pitch + lane * 8;
  AdapterItem next(load_shared16(items + first * sizeof(AdapterItem)));
  int index = first;
#pragma unroll 1
  for (; index < stage.num_items; ++index) {
    AdapterItem const item = next;
    next = AdapterItem(load_shared16(items + min(index + 1, kStageItems - 1) * sizeof(AdapterItem)));
    int const first_row = item.first_row() - tile_row;
    unsigned const num_rows = item.end_row() - item.first_row();
    if (first_row >= 8 * kTiles) break;
    int const lora_rank = item.lora_rank();
    uint32_t const b = memory + item.b_offset + lane * 8;
    float sum[kParts][kTiles][4] = {};
#pragma unroll 1
    for (int rank = 0; rank < lora_rank; rank += 16) {
      uint32_t a[kParts][4];
      int const valid = lora_rank - rank - lane * 4;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        uint32_t const at = b + columns.column[part] * item.row_bytes + rank * 2;
        if (plain) {
          a[part][0] = load_shared4(at);
          a[part][1] = load_shared4(at + 8 * item.row_bytes);
          a[part][2] = load_shared4(at + 4);
          a[part][3] = load_shared4(at + 8 * item.row_bytes + 4);
        } else {
          uint2 top = load_shared8_if(columns.has(stage, columns.column[part]) && valid > 0, at);
          uint2 bottom = load_shared8_if(columns.has(stage, columns.column[part] + 8) && valid > 0, at + 8 * item.row_bytes);
          keep_first4(top, valid);
          keep_first4(bottom, valid);
          a[part][0] = top.x;
          a[part][1] = bottom.x;
          a[part][2] = top.y;
          a[part][3] = bottom.y;
        }
      }
      uint2 v[kTiles];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        unsigned const row = 8 * tile + quad - first_row;
        v[tile] = load_shared8_if(row < (valid > 0 ? num_rows : 0u), hidden + 8 * tile * stage.hidden_pitch + rank * 2);
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        if (kSkips && (first_row >= 8 * tile + 8 || first_row + static_cast<int>(num_rows) <= 8 * tile)) continue;
#pragma unroll
        for (int part = 0; part < kParts; ++part)
          mma_16x8x16<T>(sum[part][tile], a[part][0], a[part][1], a[part][2], a[part][3], v[tile].x, v[tile].y);
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (kSkips && (first_row >= 8 * tile + 8 || first_row + static_cast<int>(num_rows) <= 8 * tile)) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        unsigned const row = 8 * tile + 2 * lane + i - first_row;
        if (row >= num_rows) continue;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          d[part][4 * tile + i] += item.scale * sum[part][tile][i];
          d[part][4 * tile + i + 2] += item.scale * sum[part][tile][i + 2];
        }
      }
    }
  }
  return index > first ? index - 1 : first;  // the last may go on
}

template <int kBy, int kCount>
__device__ inline void turn_left(float (&d)[kCount]) {
  float turned[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) turned[i] = d[(i + kBy) % kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) d[i] = turned[i];
}

// Adds what has come into the ring to the sums of a warp's kParts times sixteen columns, the first from `group` on and the others 64 behind each other.
template <typename T, int kRows, int kParts>
__device__ inline void add_adapters(LinearRing& ring, int group, float (&d)[kParts][kRows / 2]) {
  // Few copies of the code, as each is fetched from memory in its turn; as many sums at a time as there are registers for.
  constexpr int kTiles = kRows == 128 ? 8 / kParts : kRows >= 32 ? 4 / kParts : kRows / 8;
  // Rows of other adapters are left out eight at a time. With many rows it is not worth its code: most are of this one.
  constexpr bool kSkips = kTiles > 1 && kRows < 128;
#pragma unroll 1
  while (true) {
    uint32_t const memory = ring.await_full();
    AdapterStage const stage = ring.adapters();
    if (stage.num_items < 0) return;
    LaneColumns16<kParts> const columns(stage, group);
    int first = 0;
    // Registers have no index at run time: where the code is large, sums take turns at the first place.
    constexpr bool kTurns = kRows == 128 && kParts == 2;
    constexpr int kCopies = kTurns ? 1 : kRows / 8 / kTiles;
#pragma unroll 1
    for (int turn = 0; turn < kRows / 8 / kTiles / kCopies; ++turn) {
#pragma unroll
      for (int copy = 0; copy < kCopies; ++copy) {
        int const tile = (turn + copy) * kTiles;
        if (8 * (tile + kTiles) <= stage.first_row || 8 * tile >= stage.end_row) continue;
        float rows[kParts][4 * kTiles];
#pragma unroll
        for (int i = 0; i < 4 * kTiles * kParts; ++i) rows[i / (4 * kTiles)][i % (4 * kTiles)] = d[i / (4 * kTiles)][4 * copy * kTiles + i % (4 * kTiles)];
        first = add_rows<T, kTiles, kParts, kSkips>(stage, columns, ring.items(), memory, first, 8 * tile, rows);
#pragma unroll
        for (int i = 0; i < 4 * kTiles * kParts; ++i) d[i / (4 * kTiles)][4 * copy * kTiles + i % (4 * kTiles)] = rows[i / (4 * kTiles)][i % (4 * kTiles)];
      }
      if constexpr (kTurns) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) turn_left<4 * kTiles>(d[part]);
      }
    }
    ring.release();
    ring.advance();
  }
}

#endif

}  // namespace punica
