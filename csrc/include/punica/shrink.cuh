// v = x A^T: every row of the step onto the low rank of its adapter, for all slices of a group.
//
// One work item is (unit, slice, split): at most 64 rows of one segment, a chunk of the lora_rank, a range of I. Whoever is the last of a unit and
// slice sums their splits, unless that is left to expand. The ranks are
// the rows of the tensor-core tile and the step's rows its columns, so that one row wastes nothing but tensor-core time,
// of which there is plenty, and A goes from memory to registers in 16-byte loads that are already in operand order.
#pragma once

#include "punica/tile.cuh"

namespace punica {

constexpr int kStepColumns = 64;  // columns of I a warp takes at a time: 128 bytes of each row

// Whole blocks of so many warps.
template <int kWarps_>
struct BlockTeam {
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = 32 * kWarps;
  static __device__ int thread() { return threadIdx.x; }
  static __device__ void sync() { __syncthreads(); }
  // Of the team, in shared memory.
  static __device__ bool& last() {
    __shared__ bool flag;
    return flag;
  }
};

// The tile of a warp of a team that works on an item: kRankTiles * 16 ranks by kRowTiles * 8 rows; kRowGroups groups of warps share out the rows, the warps
// of a group the columns. kUnroll steps are loaded before the first is used.
template <typename Team_, int kRankTiles_, int kRowTiles_, int kRowGroups_, int kUnroll_>
struct ShrinkTile {
  using Team = Team_;
  static constexpr int kRankTiles = kRankTiles_;
  static constexpr int kRowTiles = kRowTiles_;
  static constexpr int kRowGroups = kRowGroups_;
  static constexpr int kUnroll = kUnroll_;
  static constexpr int kColumnGroups = Team::kWarps / kRowGroups;
  static constexpr int kRanks = 16 * kRankTiles;
  static constexpr int kRows = 8 * kRowTiles * kRowGroups;
  static constexpr int kPitch = kRanks + 4;  // of the reduction buffer: without bank conflicts
  static constexpr int kFloats = kColumnGroups * kRows * kPitch;
};
template <typename Team>
using ShortTile = ShrinkTile<Team, 1, 1, 1, 2>;  // segments of 1 to 8 rows
template <typename Team>
using MiddleTile = ShrinkTile<Team, 2, 2, 1, 1>;  // up to 16 rows
template <typename Team>
using TallTile = ShrinkTile<Team, 2, 4, 2, 1>;  // up to 64 rows
using ShrinkBlock = BlockTeam<8>;
static_assert(TallTile<ShrinkBlock>::kRows == kMaxTileRows);

constexpr int max_of(int a, int b) { return a > b ? a : b; }
constexpr int kShrinkFloats = max_of(ShortTile<ShrinkBlock>::kFloats, max_of(MiddleTile<ShrinkBlock>::kFloats, TallTile<ShrinkBlock>::kFloats));

struct ShrinkItem {
  int row_start;
  int row_count;
  int rank_start;
  int rank_pitch;
  int slice;
  int split;
  int splits;
  int counter;     // of the unit in this slice
  int first_step;  // steps of kStepColumns: [first_step, end_step)
  int end_step;
};

template <typename Tile>
struct ShrinkOperands {
  Vec8 a[Tile::kUnroll][2][Tile::kRankTiles][2];  // [step][half of the step][16 ranks][upper, lower 8]
  Vec8 x[Tile::kUnroll][2][Tile::kRowTiles];
};

// First column of a lane in a step's half, and how many columns from there on belong to the item (may be <= 0).
struct LaneColumns {
  int first;
  int valid;
};

__device__ inline LaneColumns lane_columns(ShrinkParams const& params, ShrinkItem const& item, int step, int half) {
  int const first = step * kStepColumns + half * 32 + threadIdx.x % 4 * 8;
  return {first, step < item.end_step ? params.in_features - first : 0};
}

template <typename T, typename Tile, bool kAligned>
__device__ inline void load_a(ShrinkOperands<Tile>& operands, ShrinkParams const& params, ShrinkItem const& item,
                              TableRecord const& record, int step) {
  T const* const a = static_cast<T const*>(params.tables.arena) + record.a_offset;
#pragma unroll
  for (int u = 0; u < Tile::kUnroll; ++u)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      LaneColumns const columns = lane_columns(params, item, step + u * Tile::kColumnGroups, half);
#pragma unroll
      for (int m = 0; m < Tile::kRankTiles; ++m)
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          int const r = item.rank_start + m * 16 + side * 8 + threadIdx.x % 32 / 4;
          operands.a[u][half][m][side] =
              load8<Source::kConstant, kAligned>(a + static_cast<int64_t>(r) * params.in_features + columns.first,
                                                 r < record.lora_rank ? columns.valid : 0);
        }
    }
}

template <typename T, typename Tile, bool kAligned>
__device__ inline void load_x(ShrinkOperands<Tile>& operands, ShrinkParams const& params, ShrinkItem const& item, int step,
                              int first_row) {
#pragma unroll
  for (int u = 0; u < Tile::kUnroll; ++u)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      LaneColumns const columns = lane_columns(params, item, step + u * Tile::kColumnGroups, half);
#pragma unroll
      for (int n = 0; n < Tile::kRowTiles; ++n) {
        int const t = first_row + n * 8 + threadIdx.x % 32 / 4;
        operands.x[u][half][n] = load8<Source::kActivation, kAligned>(
            static_cast<T const*>(params.x) + (item.row_start + t) * params.x_stride + columns.first,
            t < item.row_count ? columns.valid : 0);
      }
    }
}

// Where a row's ranks from the item's first on lie among `row_start ...`, in elements.
__device__ inline int64_t hidden_offset(ShrinkParams const& params, ShrinkItem const& item, int t) {
  int64_t const row = static_cast<int64_t>(item.row_start + t) * params.tables.slices + item.slice;
  return row * item.rank_pitch + item.rank_start;
}

// Stores four ranks of the result, those from `valid` on as zeros.
template <typename T>
__device__ inline void store_hidden(ShrinkParams const& params, int64_t offset, float4 sum, int valid) {
  float4 const kept = first_ranks(sum, valid);
  uint2 const words = make_uint2(Convert<T>::pack(kept.x, kept.y), Convert<T>::pack(kept.z, kept.w));
  *reinterpret_cast<uint2*>(static_cast<T*>(params.scratch.hidden) + offset) = words;
}

// Calls visit(t, r) for every row of the item and every fourth rank of its chunk, up to lora_rank rounded up to 8.
template <typename Tile, typename Visit>
__device__ inline void for_each_quad(ShrinkItem const& item, int lora_rank, Visit visit) {
  constexpr int kQuads = Tile::kRanks / 4;
  int const end = round_up(lora_rank, kRowAlignment) - item.rank_start;
#pragma unroll 1
  for (int index = Tile::Team::thread(); index < item.row_count * kQuads; index += Tile::Team::kThreads) {
    int const r = index % kQuads * 4;
    if (r < end) visit(index / kQuads, r);
  }
}

// Whether the item is the last of its unit and slice. All that the others have stored is visible then.
template <typename Team>
__device__ inline bool is_last(ShrinkParams const& params, ShrinkItem const& item) {
  bool& last = Team::last();
  Team::sync();
  if (Team::thread() == 0) {
    int* const counter = params.scratch.counters + item.counter;
    last = count_in_order(counter) == item.splits - 1;
    if (last) *counter = 0;
  }
  Team::sync();
  return last;
}

// Sums the splits of a unit in a fixed order.
template <typename T, typename Tile>
__device__ inline void sum_splits(ShrinkParams const& params, ShrinkItem const& item, int lora_rank) {
  constexpr int kAtOnce = 8;
  Scratch const& scratch = params.scratch;
  int64_t const pitch = static_cast<int64_t>(scratch.num_rows) * params.tables.slices * item.rank_pitch;
  for_each_quad<Tile>(item, lora_rank, [&](int t, int r) {
    int64_t const offset = hidden_offset(params, item, t) + r;
    float const* from = scratch.parts + offset;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
    for (int first = 0; first < item.splits; first += kAtOnce) {
      float4 term[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) term[i] = load_floats_if(first + i < item.splits, from + i * pitch);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) sum = added(sum, term[i]);
      from += kAtOnce * pitch;
    }
    store_hidden<T>(params, offset, sum, lora_rank - item.rank_start - r);
  });
}

// Sums the warps' partial tiles in a fixed order; the splits of a unit too, if expand does not, and this is the last of them. Returns whether the unit's rows
// are complete in this slice.
template <typename T, typename Tile>
__device__ inline bool reduce_and_store(float (&acc)[Tile::kRankTiles][Tile::kRowTiles][4], float* buffer,
                                        ShrinkParams const& params, ShrinkItem const& item, int lora_rank, int first_row) {
  int const lane = threadIdx.x % 32;
  int const column_group = Tile::Team::thread() / 32 % Tile::kColumnGroups;
#pragma unroll
  for (int m = 0; m < Tile::kRankTiles; ++m)
#pragma unroll
    for (int n = 0; n < Tile::kRowTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int const r = m * 16 + i / 2 * 8 + lane / 4;
        int const t = first_row + n * 8 + lane % 4 * 2 + i % 2;
        buffer[(column_group * Tile::kRows + t) * Tile::kPitch + r] = acc[m][n][i];
      }
  Tile::Team::sync();
  Scratch const& scratch = params.scratch;
  int64_t const split = static_cast<int64_t>(item.split) * scratch.num_rows * params.tables.slices * item.rank_pitch;
  for_each_quad<Tile>(item, lora_rank, [&](int t, int r) {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int group = 0; group < Tile::kColumnGroups; ++group)
      sum = added(sum, *reinterpret_cast<float4 const*>(buffer + (group * Tile::kRows + t) * Tile::kPitch + r));
    int64_t const offset = hidden_offset(params, item, t) + r;
    if (scratch.summed && item.splits == 1) {
      store_hidden<T>(params, offset, sum, lora_rank - item.rank_start - r);
    } else {
      *reinterpret_cast<float4*>(scratch.parts + split + offset) = sum;
    }
  });
  bool const complete = item.splits == 1 || (scratch.summed && is_last<typename Tile::Team>(params, item));
  if (complete && item.splits > 1) sum_splits<T, Tile>(params, item, lora_rank);
  Tile::Team::sync();
  return complete;
}

// The kernel after may begin when every block has come here; unless it runs beside this one, it waits for the end itself.
__device__ inline void wait_and_release(ShrinkParams const& params) {
  wait_for_previous();
  if (params.beside) start_next();
}

// The block's first item waits for the kernel before when the weights of its first step are on their way.
template <typename T, typename Tile, bool kAligned>
__device__ inline bool shrink_item(ShrinkParams const& params, ShrinkItem const& item, TableRecord const& record,
                                   float* buffer, bool must_wait) {
  int const warp = Tile::Team::thread() / 32;
  int const first_row = warp / Tile::kColumnGroups * Tile::kRowTiles * 8;
  float acc[Tile::kRankTiles][Tile::kRowTiles][4] = {};
  int const stride = Tile::kColumnGroups * Tile::kUnroll;
  for (int step = item.first_step + warp % Tile::kColumnGroups; step < item.end_step; step += stride) {
    ShrinkOperands<Tile> operands;
    load_a<T, Tile, kAligned>(operands, params, item, record, step);
    if (must_wait) wait_and_release(params);
    must_wait = false;
    load_x<T, Tile, kAligned>(operands, params, item, step, first_row);
#pragma unroll
    for (int u = 0; u < Tile::kUnroll; ++u)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int m = 0; m < Tile::kRankTiles; ++m)
#pragma unroll
          for (int n = 0; n < Tile::kRowTiles; ++n)
            mma_16x8x32<T>(acc[m][n], operands.a[u][half][m][0], operands.a[u][half][m][1], operands.x[u][half][n]);
  }
  if (must_wait) wait_and_release(params);  // this warp had no step
  return reduce_and_store<T, Tile>(acc, buffer, params, item, record.lora_rank, first_row);
}

// Item `index` of all; returns its unit.
__device__ inline int4 load_unit(ShrinkParams const& params, WorkList const& work, int splits, int index, ShrinkItem& item) {
  int const steps = (params.in_features + kStepColumns - 1) / kStepColumns;
  item.split = index % splits;
  item.splits = splits;
  item.counter = index / splits;
  item.slice = index / splits % params.tables.slices;
  int4 const unit = load_item(params.tables.plan, work.units_offset, index / splits / params.tables.slices);
  item.row_start = unit.x;
  item.row_count = unit.y;
  item.rank_start = unit.w & 0xffff;
  item.rank_pitch = work.rank_pitch;
  item.first_step = steps * item.split / splits;
  item.end_step = steps * (item.split + 1) / splits;
  return unit;
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(ShrinkBlock::kThreads, 2) shrink_kernel(const __grid_constant__ ShrinkParams params) {
  __shared__ __align__(16) float buffer[kShrinkFloats];
  if (!params.beside) start_next();
  bool must_wait = true;
  Tables const& tables = params.tables;
  WorkList const work = load_work_list(tables, params.scratch);
  int const splits = split_count(params.scratch, work.num_units, tables.slices, params.in_features);
  for (int index = blockIdx.x; index < work.num_units * tables.slices * splits; index += gridDim.x) {
    ShrinkItem item;
    int4 const unit = load_unit(params, work, splits, index, item);
    TableRecord const record = load_record(tables, item.slice, unit.z);
    if (item.rank_start >= record.lora_rank) continue;
    if (unit.w >> 16 == kShrinkChunkShort) {
      shrink_item<T, ShortTile<ShrinkBlock>, kAligned>(params, item, record, buffer, must_wait);
    } else if (item.row_count <= MiddleTile<ShrinkBlock>::kRows) {
      shrink_item<T, MiddleTile<ShrinkBlock>, kAligned>(params, item, record, buffer, must_wait);
    } else {
      shrink_item<T, TallTile<ShrinkBlock>, kAligned>(params, item, record, buffer, must_wait);
    }
    must_wait = false;
  }
  if (must_wait) wait_and_release(params);
}

template <typename T>
cudaError_t launch_shrink(ShrinkParams const& params, LaunchConfig const& config) {
  bool const aligned = params.in_features % 8 == 0 && params.x_stride % 8 == 0 && reinterpret_cast<uintptr_t>(params.x) % 16 == 0;
  auto* const kernel = aligned ? shrink_kernel<T, true> : shrink_kernel<T, false>;
  return launch(kernel, params.scratch.num_blocks, ShrinkBlock::kThreads, params, config);
}

}  // namespace punica
