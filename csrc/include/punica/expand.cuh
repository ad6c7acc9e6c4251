// y = gain * (y + scale * v B^T) + bias: the low-rank rows of a step onto the whole fused output of a group.
//
// The plan lists shares of tiles (at most 64 rows of one segment): a tile that moves more bytes a column has more shares, each
// of them a range of output columns. The kernel cuts every share into the same number of items. For each item the block
// sums the splits that shrink left into shared memory, in a fixed order; each warp then streams weights through two
// register buffers. The first weights are on their way before the block waits for shrink.
#pragma once

#include "punica/columns.cuh"

namespace punica {

constexpr int kExpandWarps = 4;
constexpr int kExpandThreads = 32 * kExpandWarps;
constexpr int kItemUnits = 16;     // units of kWarpColumns columns of an item when there is work for every block
constexpr int kMinItemUnits = 4;   // and at least, when there is not
constexpr int kHiddenPitch = kMaxRank + 8;  // of the shared low-rank rows: without bank conflicts

// Units [first_unit, end_unit) of one slice for one tile.
//
// A quad of lanes loads 32 elements of K at once. Matrices of lora_rank up to 16 would leave half of the lanes idle, so there
// a quad loads a pack of two units; they are multiplied one after the other, with zeros in the lanes of the other.
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
  T const* b;  // the lane's first element, were it to load unit 0
  T* y;        // the lane's first element in row 0 of its tile, were it to hold unit 0

  __device__ int num_packs() const { return (end_unit - first_unit + (1 << log2_pack) - 1) >> log2_pack; }

  // Packs of this warp: first_pack(), first_pack() + kExpandWarps, ...
  __device__ static int first_pack() { return threadIdx.x / 32; }

  // First of the lane's eight columns in a unit.
  __device__ static int lane_column() { return threadIdx.x % 32 / 4 * 8; }

  // Which unit of a pack the lane loads, and the first element of K within a chunk.
  __device__ int lane_unit() const { return threadIdx.x % 4 >> (2 - log2_pack); }
  __device__ int lane_k() const { return (threadIdx.x % 4 & ((4 >> log2_pack) - 1)) * 8; }

  template <bool kAligned>
  __device__ WeightChunk load(int pack, int chunk) const {
    int const unit = first_unit + (pack << log2_pack) + lane_unit();
    int const valid = unit < end_unit ? width - unit * kWarpColumns - lane_column() : 0;
    return load_weights<kAligned>(b + static_cast<int64_t>(unit * kWarpColumns) * pitch + chunk * kChunk, pitch, valid,
                                  lora_rank - chunk * kChunk - lane_k());
  }
};

// The fp32 sums of a part's rows: row t of split k starts at v + t * row_pitch + k * split_pitch.
struct HiddenSource {
  float const* v;
  int row_pitch;
  int64_t split_pitch;
  int splits;
};

// Sums the splits of v for the part's rows into `hidden` [rows, kHiddenPitch], rounded to T; zero beyond lora_rank and up to
// `num_rows` rows.
template <typename T>
__device__ inline void gather_hidden(T* hidden, HiddenSource const& source, Part<T> const& part, int num_rows) {
  int const quads = part.chunks * (kChunk / 4);
  for (int index = threadIdx.x; index < num_rows * quads; index += kExpandThreads) {
    int const t = index / quads;
    int const r = index % quads * 4;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    if (t < part.row_count && r < part.lora_rank) {
      float const* const v = source.v + t * source.row_pitch + r;
#pragma unroll 4
      for (int split = 0; split < source.splits; ++split) {
        float4 const term = __ldcg(reinterpret_cast<float4 const*>(v + split * source.split_pitch));
        sum = make_float4(sum.x + term.x, sum.y + term.y, sum.z + term.z, sum.w + term.w);
      }
    }
    int const left = part.lora_rank - r;  // the ranks of a last, partial quad were never written
    uint32_t const low = Convert<T>::pack(sum.x, left > 1 ? sum.y : 0.f);
    uint32_t const high = Convert<T>::pack(left > 2 ? sum.z : 0.f, left > 3 ? sum.w : 0.f);
    *reinterpret_cast<uint2*>(hidden + t * kHiddenPitch + r) = make_uint2(low, high);
  }
}

// Low-rank rows first_row .. of a chunk as the tensor core's column operand; zero in lanes that hold another unit's weights.
template <typename T, int kRowTiles>
__device__ inline void load_hidden(Vec8 (&rows)[kRowTiles], T const* hidden, Part<T> const& part, int first_row, int chunk,
                                   int unit_of_pack) {
  T const* const from = hidden + (first_row + threadIdx.x % 32 / 4) * kHiddenPitch + chunk * kChunk + part.lane_k();
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
    rows[n] = zero8();
    if (part.lane_unit() == unit_of_pack) rows[n] = from_raw(*reinterpret_cast<uint4 const*>(from + n * 8 * kHiddenPitch));
  }
}

// y of one visit: a unit of columns by a group of 8 or 16 rows.
template <typename T, int kRowTiles, bool kAligned>
__device__ inline void load_output(Vec8 (&y)[kRowTiles][2], Part<T> const& part, int64_t y_stride, int unit, int first_row) {
  int const valid = unit < part.end_unit ? part.width - unit * kWarpColumns - Part<T>::lane_column() : 0;
  T const* const from = part.y + first_row * y_stride + unit * kWarpColumns;
  int const rows = part.row_count - first_row - threadIdx.x % 4 * 2;
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
    for (int side = 0; side < 2; ++side)
      y[n][side] = load8<Source::kActivation, kAligned>(from + (n * 8 + side) * y_stride, n * 8 + side < rows ? valid : 0);
}

template <typename T, int kRowTiles, bool kAligned>
__device__ inline void store_output(float const (&acc)[4][kRowTiles][4], Vec8 const (&y)[kRowTiles][2],
                                    Part<T> const& part, Affine<T> const& affine, int64_t y_stride, int unit,
                                    int first_row) {
  int const column = unit * kWarpColumns + Part<T>::lane_column();
  int const valid = unit < part.end_unit ? part.width - column : 0;
  if (valid <= 0) return;
  T* const to = part.y + first_row * y_stride + unit * kWarpColumns;
  int const rows = part.row_count - first_row - threadIdx.x % 4 * 2;
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      if (n * 8 + side >= rows) continue;
      float out[8];
      columns_of<kRowTiles>(out, acc, n, side);
#pragma unroll
      for (int i = 0; i < 8; ++i) out[i] = get<T>(y[n][side], i) + part.scale * out[i];
      affine.apply(out, column, valid);
      store8<T, kAligned>(to + (n * 8 + side) * y_stride, out, valid);
    }
}

// For decode, the output of the next pack's units, first 8 rows: loaded in place well before its use.
template <int kRowTiles>
struct HeldOutput {
  static constexpr int kUnits = kRowTiles == 1 ? 2 : 0;
  Vec8 y[kUnits > 0 ? kUnits : 1][kRowTiles][2];
};

template <typename T, int kRowTiles, bool kAligned>
__device__ inline void load_held(HeldOutput<kRowTiles>& held, Part<T> const& part, int64_t y_stride, int pack) {
#pragma unroll
  for (int p = 0; p < HeldOutput<kRowTiles>::kUnits; ++p) {
    int const unit = p >> part.log2_pack ? part.end_unit : part.first_unit + (pack << part.log2_pack) + p;
    load_output<T, kRowTiles, kAligned>(held.y[p], part, y_stride, unit, 0);
  }
}

// Row groups of 8 * kRowTiles rows of a tile.
template <int kRowTiles>
constexpr int kGroups = kRowTiles == 1 ? 2 : 4;

// One pack whose K fits one chunk.
template <typename T, int kRowTiles, bool kAligned>
__device__ inline void expand_pack(Part<T> const& part, Affine<T> const& affine, int64_t y_stride, WeightChunk const& weights,
                                   HeldOutput<kRowTiles> const& held, T const* hidden, int pack) {
  constexpr int kHeldGroups = HeldOutput<kRowTiles>::kUnits > 0 ? 1 : 0;
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    if (p >> part.log2_pack) continue;
    int const unit = part.first_unit + (pack << part.log2_pack) + p;
    Vec8 y[kGroups<kRowTiles>][kRowTiles][2];
#pragma unroll
    for (int group = kHeldGroups; group < kGroups<kRowTiles>; ++group)
      load_output<T, kRowTiles, kAligned>(y[group], part, y_stride, unit, group * 8 * kRowTiles);
#pragma unroll
    for (int group = 0; group < kGroups<kRowTiles>; ++group) {
      int const row = group * 8 * kRowTiles;
      if (row >= part.row_count) continue;
      float acc[4][kRowTiles][4] = {};
      Vec8 rows[kRowTiles];
      load_hidden<T, kRowTiles>(rows, hidden, part, row, 0, p);
      multiply<T, kRowTiles>(acc, weights, rows);
      if (group < kHeldGroups) {
        store_output<T, kRowTiles, kAligned>(acc, held.y[kHeldGroups * p], part, affine, y_stride, unit, row);
      } else {
        store_output<T, kRowTiles, kAligned>(acc, y[group], part, affine, y_stride, unit, row);
      }
    }
  }
}

// lora_rank up to 32: the buffers hold alternate packs.
template <typename T, int kRowTiles, bool kAligned>
__device__ inline void expand_shallow(Part<T> const& part, Affine<T> const& affine, int64_t y_stride, WeightChunk& first,
                                      WeightChunk& second, HeldOutput<kRowTiles>& held, T const* hidden) {
  int const packs = part.num_packs();
  for (int pack = Part<T>::first_pack(); pack < packs; pack += 2 * kExpandWarps) {
    expand_pack<T, kRowTiles, kAligned>(part, affine, y_stride, first, held, hidden, pack);
    load_held<T, kRowTiles, kAligned>(held, part, y_stride, pack + kExpandWarps);
    first = part.template load<kAligned>(pack + 2 * kExpandWarps, 0);
    if (pack + kExpandWarps >= packs) break;
    expand_pack<T, kRowTiles, kAligned>(part, affine, y_stride, second, held, hidden, pack + kExpandWarps);
    load_held<T, kRowTiles, kAligned>(held, part, y_stride, pack + 2 * kExpandWarps);
    second = part.template load<kAligned>(pack + 3 * kExpandWarps, 0);
  }
}

// lora_rank above 32: the buffers hold even and odd chunks of one unit, reloaded while the other is in use; up to 64, where
// two chunks are all, only after the last row group.
template <typename T, int kRowTiles, bool kAligned>
__device__ inline void expand_deep(Part<T> const& part, Affine<T> const& affine, int64_t y_stride, WeightChunk& first,
                                   WeightChunk& second, HeldOutput<kRowTiles>& held, T const* hidden) {
  constexpr int kHeldGroups = HeldOutput<kRowTiles>::kUnits > 0 ? 1 : 0;
  int const packs = part.num_packs();
  for (int pack = Part<T>::first_pack(); pack < packs; pack += kExpandWarps) {
    int const unit = part.first_unit + pack;
    Vec8 y[kGroups<kRowTiles>][kRowTiles][2];
#pragma unroll
    for (int group = kHeldGroups; group < kGroups<kRowTiles>; ++group)
      load_output<T, kRowTiles, kAligned>(y[group], part, y_stride, unit, group * 8 * kRowTiles);
#pragma unroll
    for (int group = 0; group < kGroups<kRowTiles>; ++group) {
      int const row = group * 8 * kRowTiles;
      if (row >= part.row_count) continue;
      bool const last_group = row + 8 * kRowTiles >= part.row_count;
      bool const reload = part.chunks > 2 || last_group;
      float acc[4][kRowTiles][4] = {};
      for (int chunk = 0; chunk < part.chunks; chunk += 2) {
        bool const last = chunk + 2 >= part.chunks;
        int const from_pack = last && last_group ? pack + kExpandWarps : pack;
        int const from_chunk = last ? 0 : chunk + 2;
        Vec8 rows[kRowTiles];
        load_hidden<T, kRowTiles>(rows, hidden, part, row, chunk, 0);
        multiply<T, kRowTiles>(acc, first, rows);
        if (reload) first = part.template load<kAligned>(from_pack, from_chunk);
        if (chunk + 1 < part.chunks) {
          load_hidden<T, kRowTiles>(rows, hidden, part, row, chunk + 1, 0);
          multiply<T, kRowTiles>(acc, second, rows);
        }
        if (reload) second = part.template load<kAligned>(from_pack, from_chunk + 1);
      }
      if (group < kHeldGroups) {
        store_output<T, kRowTiles, kAligned>(acc, held.y[0], part, affine, y_stride, unit, row);
        load_held<T, kRowTiles, kAligned>(held, part, y_stride, pack + kExpandWarps);
      } else {
        store_output<T, kRowTiles, kAligned>(acc, y[group], part, affine, y_stride, unit, row);
      }
    }
  }
}

template <typename T, int kRowTiles, bool kAligned>
__device__ inline void expand_part(Part<T> const& part, Affine<T> const& affine, HiddenSource const& source,
                                   int64_t y_stride, T* hidden, bool& must_wait) {
  bool const deep = part.chunks > 1;
  int const pack = Part<T>::first_pack();
  WeightChunk first = part.template load<kAligned>(pack, 0);
  WeightChunk second = part.template load<kAligned>(deep ? pack : pack + kExpandWarps, deep ? 1 : 0);
  if (must_wait) wait_for_previous();
  must_wait = false;
  HeldOutput<kRowTiles> held;
  load_held<T, kRowTiles, kAligned>(held, part, y_stride, pack);
  __syncthreads();  // the part before has been read
  gather_hidden(hidden, source, part, round_up(part.row_count, 8 * kRowTiles));
  __syncthreads();
  if (deep) {
    expand_deep<T, kRowTiles, kAligned>(part, affine, y_stride, first, second, held, hidden);
  } else {
    expand_shallow<T, kRowTiles, kAligned>(part, affine, y_stride, first, second, held, hidden);
  }
}

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

__device__ inline Cut make_cut(ExpandParams const& params, int num_shares) {
  int const units = params.unit_end[params.tables.slices - 1];
  int const busy = (units + kItemUnits - 1) / kItemUnits;
  int const spread = min((units + kMinItemUnits - 1) / kMinItemUnits, static_cast<int>(gridDim.x) / max(num_shares, 1));
  return {units, max(busy, spread)};
}

// `tile` has been loaded for the item; its record is loaded here.
__device__ inline ExpandItem make_item(ExpandParams const& params, Cut const& cut, int4 tile, int index) {
  ExpandItem item;
  item.tile = tile;
  int const shares = tile.w >> 16;
  int64_t const piece = static_cast<int64_t>(tile.w & 0xffff) * cut.items_a_share + index % cut.items_a_share;
  int const pieces = shares * cut.items_a_share;
  item.first_unit = static_cast<int>(cut.units * piece / pieces);
  item.end_unit = static_cast<int>(cut.units * (piece + 1) / pieces);
  item.slice = 0;
  while (item.slice + 1 < params.tables.slices && params.unit_end[item.slice] <= item.first_unit) ++item.slice;
  item.record = load_record(params.tables, item.slice, tile.z);
  return item;
}

template <typename T>
__device__ inline Part<T> make_part(ExpandParams const& params, ExpandItem const& item) {
  int const start = item.slice > 0 ? params.unit_end[item.slice - 1] : 0;
  Part<T> part;
  part.row_count = item.tile.y;
  part.lora_rank = item.record.lora_rank;
  part.width = params.widths[item.slice];
  part.first_unit = item.first_unit - start;
  part.end_unit = min(item.end_unit, params.unit_end[item.slice]) - start;
  part.chunks = (part.lora_rank + kChunk - 1) / kChunk;
  part.log2_pack = part.lora_rank <= 16 ? 1 : 0;
  part.pitch = round_up(part.lora_rank, kRowAlignment);
  part.scale = item.record.scale;
  part.b = static_cast<T const*>(params.tables.arena) + item.record.b_offset + Part<T>::lane_column() * part.pitch +
           part.lane_k();
  part.y = static_cast<T*>(params.y) + (item.tile.x + static_cast<int>(threadIdx.x) % 4 * 2) * params.y_stride +
           params.columns[item.slice] + Part<T>::lane_column();
  return part;
}

// The part of an item that lies in one slice.
template <typename T, int kRowTiles, bool kAligned>
__device__ inline void expand_slice(ExpandParams const& params, ExpandItem const& item, int splits, T* hidden,
                                    bool& must_wait) {
  if (item.record.lora_rank == 0) return;
  Scratch const& scratch = params.scratch;
  int const row_pitch = params.tables.slices * scratch.max_rank;
  Part<T> const part = make_part<T>(params, item);
  Affine<T> const affine{static_cast<T const*>(params.tables.arena), item.record.gain_offset, item.record.bias_offset};
  HiddenSource const source{scratch.v + static_cast<int64_t>(item.tile.x) * row_pitch + item.slice * scratch.max_rank,
                            row_pitch, static_cast<int64_t>(scratch.num_rows) * row_pitch, splits};
  expand_part<T, kRowTiles, kAligned>(part, affine, source, params.y_stride, hidden, must_wait);
}

// kRowTiles * 8 rows at a time: 1 for decode, 2 for prompts, whose blocks need more registers.
template <typename T, int kRowTiles, bool kAligned>
__global__ void __launch_bounds__(kExpandThreads, kRowTiles == 1 ? 3 : 2)
    expand_kernel(const __grid_constant__ ExpandParams params) {
  __shared__ __align__(16) T hidden[kMaxTileRows * kHiddenPitch];
  start_next();
  int32_t const* const plan = params.tables.plan;
  int const offset = __ldg(plan + kExpandOffset);
  int const num_shares = __ldg(plan + kNumExpandShares);
  int const num_units = __ldg(plan + kNumShrinkUnits);
  Cut const cut = make_cut(params, num_shares);
  int const num_items = num_shares * cut.items_a_share;
  int const stride = gridDim.x;
  auto const load_tile = [&](int index) {
    return load_item(plan, offset, min(index, num_items - 1) / cut.items_a_share);
  };
  bool must_wait = true;
  if (blockIdx.x < num_items) {
    int4 tile = load_tile(blockIdx.x);
    int const splits = split_count(params.scratch, num_units, params.tables.slices, params.in_features);
    for (int index = blockIdx.x; index < num_items; index += stride) {
      ExpandItem item = make_item(params, cut, tile, index);
      tile = load_tile(index + stride);
      expand_slice<T, kRowTiles, kAligned>(params, item, splits, hidden, must_wait);
      while (params.unit_end[item.slice] < item.end_unit) {
        item.first_unit = params.unit_end[item.slice++];
        item.record = load_record(params.tables, item.slice, item.tile.z);
        expand_slice<T, kRowTiles, kAligned>(params, item, splits, hidden, must_wait);
      }
    }
  }
  if (must_wait) wait_for_previous();
}

template <typename T>
cudaError_t launch_expand(ExpandParams const& params, LaunchConfig const& config) {
  bool aligned = params.y_stride % 8 == 0 && reinterpret_cast<uintptr_t>(params.y) % 16 == 0;
  for (int slice = 0; slice < params.tables.slices; ++slice) aligned = aligned && params.widths[slice] % 8 == 0;
  bool const tall = params.scratch.num_rows > kMaxDecodeRows;
  auto* const kernel = tall ? (aligned ? expand_kernel<T, 2, true> : expand_kernel<T, 2, false>)
                            : (aligned ? expand_kernel<T, 1, true> : expand_kernel<T, 1, false>);
  return launch(kernel, config.num_sms * expand_blocks_per_sm(params.scratch.num_rows), kExpandThreads, params, config);
}

}  // namespace punica
