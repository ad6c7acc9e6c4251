// What a block of lora_expand works on: some columns of one slice for one tile of rows.
#pragma once

#include "punica/columns.cuh"
#include "punica/expand_items.cuh"

namespace punica {

constexpr int kWarpRows = 16;  // rows of the tensor core's tile

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

// The tensor core's tile has sixteen rows. Where the step's are fewer they hold several units: with U units in a pack, unit u has the rows
// 16 u / U and on, whose low-rank numbers are zero where a lane's weights belong to another unit. As many as lora_rank leaves lanes for and rows
// leave room for.
__device__ inline int log2_pack_of(int row_count, int lora_rank) {
  if (row_count <= 4 && lora_rank <= 8) return 2;
  return row_count <= 8 && lora_rank <= 16 ? 1 : 0;
}

// Tile row g or g + 8 of a lane: the part's row that it holds, and whether that row is of the unit of the lane's weights.
struct PackedRow {
  int row;
  bool own;

  template <typename T>
  __device__ PackedRow(Part<T> const& part, int first_row, int half) {
    int const tile_row = threadIdx.x % 32 / 4 + half * 8;
    row = first_row + (tile_row & ((kWarpRows >> part.log2_pack) - 1));
    own = tile_row >> (4 - part.log2_pack) == part.lane_unit();
  }
};

// The low-rank rows of a part that shrink has left: summed, or row t of split k at parts + t * pitch + k * split_pitch.
template <typename T>
struct Hidden {
  T const* v;  // of row 0
  float const* parts;
  int pitch;   // from row to row
  int64_t split_pitch;
  int splits;

  // Ranks [rank, rank + 8) of a row, if `wanted`.
  __device__ Vec8 load(bool wanted, int row, int rank) const {
    return load8<Source::kActivation, true>(v + static_cast<int64_t>(row) * pitch + rank, wanted ? 8 : 0);
  }
};

// Rows of the step as the tensor core's row operand: tile rows g and g + 8 of a lane.
struct TileRows {
  uint32_t word[2][4];  // in the order of two instructions: k of g, of g + 8, the next k of g, of g + 8
};

// All rows and ranks of a part in shared memory, as the operands they will be.
struct Staged {
  uint4 operand[kMaxTileRows / kWarpRows * (kMaxRank / 32) * 2 * 32];  // [16 rows][32 ranks][instruction][lane]

  __device__ TileRows rows(int chunks, int tile, int chunk) const {
    TileRows out;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      uint4 const raw = operand[((tile * chunks + chunk) * 2 + k) * 32 + threadIdx.x % 32];
      out.word[k][0] = raw.x;
      out.word[k][1] = raw.y;
      out.word[k][2] = raw.z;
      out.word[k][3] = raw.w;
    }
    return out;
  }

  template <int kThreads, typename T>
  __device__ void fill(Hidden<T> const& hidden, Part<T> const& part) {
    int const vectors = part.chunks * 4;  // of a row
#pragma unroll 1
    for (int index = threadIdx.x; index < part.row_count * vectors; index += kThreads) {
      int const row = quotient(index, vectors);
      int const vector = index - row * vectors;
      Vec8 const words = hidden.load(vector * 8 < part.lora_rank, row, vector * 8);
      int const lane = row % 8 * 4 + vector % 4;
#pragma unroll
      for (int k = 0; k < 4; ++k) *word(part.chunks, row, vector / 4, lane, k) = words.word[k];
    }
  }

  // Word k of a lane's eight ranks in a row.
  __device__ uint32_t* word(int chunks, int row, int chunk, int lane, int k) {
    auto* const words = reinterpret_cast<uint32_t*>(operand + ((row / kWarpRows * chunks + chunk) * 2 + k / 2) * 32 + lane);
    return words + k % 2 * 2 + row % kWarpRows / 8;
  }

  // As `fill` from the splits. Four lanes share four ranks: lane i takes the splits i, i + 4, ..., and the four sums are added in a fixed order.
  template <int kThreads, typename T>
  __device__ void sum(Hidden<T> const& hidden, Part<T> const& part) {
    constexpr int kAtOnce = 2;
    constexpr int kSplitsAtOnce = 4;
    constexpr int kGroups = kThreads / 4;
    int const first_split = threadIdx.x % 4;
    int const quads = part.chunks * 8;  // of a row
    int const count = part.row_count * quads;
#pragma unroll 1
    for (int start = threadIdx.x / 4; start < round_up(count, kGroups); start += kAtOnce * kGroups) {
      float4 sum[kAtOnce];
      float const* from[kAtOnce];
      int splits[kAtOnce];
      int ranks[kAtOnce];
      uint32_t* to[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        int const index = start + i * kGroups;
        int const row = quotient(index, quads);
        int const quad = index - row * quads;
        ranks[i] = part.lora_rank - quad * 4;
        splits[i] = index < count && ranks[i] > 0 ? hidden.splits : 0;
        from[i] = hidden.parts + static_cast<int64_t>(row) * hidden.pitch + quad * 4 + first_split * hidden.split_pitch;
        to[i] = word(part.chunks, row, quad / 8, row % 8 * 4 + quad / 2 % 4, quad % 2 * 2);
        sum[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      }
#pragma unroll 1
      for (int first = first_split; first < round_up(hidden.splits, 4); first += 4 * kSplitsAtOnce) {
        float4 term[kAtOnce][kSplitsAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
          for (int j = 0; j < kSplitsAtOnce; ++j) term[i][j] = load_floats_if(first + 4 * j < splits[i], from[i] + 4 * j * hidden.split_pitch);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          from[i] += 4 * kSplitsAtOnce * hidden.split_pitch;
#pragma unroll
          for (int j = 0; j < kSplitsAtOnce; ++j) sum[i] = added(sum[i], term[i][j]);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float4 const all = first_ranks(quad_sum(sum[i]), ranks[i]);
        if (first_split != 0 || start + i * kGroups >= count) continue;
        to[i][0] = Convert<T>::pack(all.x, all.y);
        to[i][2] = Convert<T>::pack(all.z, all.w);  // two words of the other row are between
      }
    }
  }

  // As `rows` of the tile from first_row on, whose sixteen rows may hold several units.
  template <typename T>
  __device__ TileRows packed_rows(Part<T> const& part, int first_row, int chunk) {
    TileRows out;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      PackedRow const at(part, first_row, half);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        uint32_t const found = *word(part.chunks, at.row, chunk, at.row % 8 * 4 + part.lane_k() / 8, k);
        out.word[k / 2][k % 2 * 2 + half] = at.own ? found : 0;
      }
    }
    return out;
  }
};

}  // namespace punica
