// y = gain * (y + scale * v B^T) + bias: the low-rank rows of a step onto the whole fused output of a group.
//
// The work is the tiles of the plan (at most 64 rows of one segment) times units of 64 output columns, weighted by the bytes
// a column of each tile moves. Every block takes one contiguous, equal share of that weight (expand_kernel) and goes
// through it tile by tile and slice by slice (Part). For each part it sums the splits that shrink left into shared memory,
// in a fixed order; each warp then streams weights through two register buffers. The first weights are on their way before
// the block waits for shrink.
#pragma once

#include "punica/columns.cuh"

namespace punica {

constexpr int kExpandWarps = 4;
constexpr int kExpandThreads = 32 * kExpandWarps;
constexpr int kExpandBlocksPerSm = 3;
constexpr int kHiddenPitch = kMaxRank + 8;  // of the shared low-rank rows: without bank conflicts

// Units [first_unit, end_unit) of one slice for one tile.
//
// A lane's load covers 32 elements of K in a quad. Matrices of lora_rank 16 or 8 would leave half or three quarters of the
// lanes idle, so there a quad loads a pack of 2 or 4 units at once; they are multiplied one after another, with zeros in the
// lanes of the others.
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
#pragma unroll 8
      for (int split = 0; split < source.splits; ++split) {
        float4 const term = __ldcg(reinterpret_cast<float4 const*>(v + split * source.split_pitch));
        sum = make_float4(sum.x + term.x, sum.y + term.y, sum.z + term.z, sum.w + term.w);
      }
    }
    int const left = part.lora_rank - r;  // the ranks of a last, partial quad were never written
    union {
      T element[4];
      uint2 raw;
    } out = {{Convert<T>::from_float(sum.x), Convert<T>::from_float(left > 1 ? sum.y : 0.f),
              Convert<T>::from_float(left > 2 ? sum.z : 0.f), Convert<T>::from_float(left > 3 ? sum.w : 0.f)}};
    *reinterpret_cast<uint2*>(hidden + t * kHiddenPitch + r) = out.raw;
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
    if (part.lane_unit() == unit_of_pack) rows[n].raw = *reinterpret_cast<uint4 const*>(from + n * 8 * kHiddenPitch);
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

template <int kRowTiles>
__device__ inline void copy_output(Vec8 (&to)[kRowTiles][2], Vec8 const (&from)[kRowTiles][2]) {
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) to[n][0] = from[n][0], to[n][1] = from[n][1];
}

// All units and row groups of one pack whose K fits one chunk. `y` holds the first visit's output, and at the end that of
// `next_pack`.
template <typename T, int kRowTiles, bool kAligned>
__device__ inline void expand_pack(Part<T> const& part, Affine<T> const& affine, int64_t y_stride,
                                   WeightChunk const& weights, T const* hidden, Vec8 (&y)[kRowTiles][2], int pack,
                                   int next_pack) {
  int const pack_units = 1 << part.log2_pack;
  for (int p = 0; p < pack_units; ++p) {
    int const unit = part.first_unit + pack * pack_units + p;
    int const next_unit = p + 1 < pack_units ? unit + 1 : part.first_unit + next_pack * pack_units;
    for (int row = 0; row < part.row_count; row += 8 * kRowTiles) {
      bool const more_rows = row + 8 * kRowTiles < part.row_count;
      Vec8 y_next[kRowTiles][2];
      load_output<T, kRowTiles, kAligned>(y_next, part, y_stride, more_rows ? unit : next_unit,
                                          more_rows ? row + 8 * kRowTiles : 0);
      float acc[4][kRowTiles][4] = {};
      Vec8 rows[kRowTiles];
      load_hidden<T, kRowTiles>(rows, hidden, part, row, 0, p);
      multiply<T, kRowTiles>(acc, weights, rows);
      store_output<T, kRowTiles, kAligned>(acc, y, part, affine, y_stride, unit, row);
      copy_output<kRowTiles>(y, y_next);
    }
  }
}

// lora_rank up to 32: `first` and `second` hold alternate packs.
template <typename T, int kRowTiles, bool kAligned>
__device__ inline void expand_shallow(Part<T> const& part, Affine<T> const& affine, int64_t y_stride, WeightChunk& first,
                                      WeightChunk& second, T const* hidden, Vec8 (&y)[kRowTiles][2]) {
  int const packs = part.num_packs();
  for (int pack = Part<T>::first_pack(); pack < packs; pack += 2 * kExpandWarps) {
    expand_pack<T, kRowTiles, kAligned>(part, affine, y_stride, first, hidden, y, pack, pack + kExpandWarps);
    first = part.template load<kAligned>(pack + 2 * kExpandWarps, 0);
    if (pack + kExpandWarps >= packs) break;
    expand_pack<T, kRowTiles, kAligned>(part, affine, y_stride, second, hidden, y, pack + kExpandWarps, pack + 2 * kExpandWarps);
    second = part.template load<kAligned>(pack + 3 * kExpandWarps, 0);
  }
}

// lora_rank above 32: `first` and `second` hold even and odd chunks of one unit, reloaded while the other is in use.
template <typename T, int kRowTiles, bool kAligned>
__device__ inline void expand_deep(Part<T> const& part, Affine<T> const& affine, int64_t y_stride, WeightChunk& first,
                                      WeightChunk& second, T const* hidden, Vec8 (&y)[kRowTiles][2]) {
  int const packs = part.num_packs();
  for (int pack = Part<T>::first_pack(); pack < packs; pack += kExpandWarps) {
    int const unit = part.first_unit + pack;
    for (int row = 0; row < part.row_count; row += 8 * kRowTiles) {
      bool const more_rows = row + 8 * kRowTiles < part.row_count;
      int const next_pack = more_rows ? pack : pack + kExpandWarps;
      Vec8 y_next[kRowTiles][2];
      load_output<T, kRowTiles, kAligned>(y_next, part, y_stride, part.first_unit + next_pack,
                                          more_rows ? row + 8 * kRowTiles : 0);
      float acc[4][kRowTiles][4] = {};
      for (int chunk = 0; chunk < part.chunks; chunk += 2) {
        bool const last = chunk + 2 >= part.chunks;
        int const from_pack = last ? next_pack : pack;
        int const from_chunk = last ? 0 : chunk + 2;
        Vec8 rows[kRowTiles];
        load_hidden<T, kRowTiles>(rows, hidden, part, row, chunk, 0);
        multiply<T, kRowTiles>(acc, first, rows);
        first = part.template load<kAligned>(from_pack, from_chunk);
        if (chunk + 1 < part.chunks) {
          load_hidden<T, kRowTiles>(rows, hidden, part, row, chunk + 1, 0);
          multiply<T, kRowTiles>(acc, second, rows);
        }
        second = part.template load<kAligned>(from_pack, from_chunk + 1);
      }
      store_output<T, kRowTiles, kAligned>(acc, y, part, affine, y_stride, unit, row);
      copy_output<kRowTiles>(y, y_next);
    }
  }
}

template <typename T, int kRowTiles, bool kAligned>
__device__ inline void expand_part(Part<T> const& part, Affine<T> const& affine, HiddenSource const& source,
                                   int64_t y_stride, WeightChunk& first, WeightChunk& second, T* hidden) {
  Vec8 y[kRowTiles][2];
  int const first_unit = part.first_unit + (Part<T>::first_pack() << part.log2_pack);
  load_output<T, kRowTiles, kAligned>(y, part, y_stride, first_unit, 0);
  __syncthreads();  // the part before has been read
  gather_hidden(hidden, source, part, round_up(part.row_count, 8 * kRowTiles));
  __syncthreads();
  if (part.chunks == 1) {
    expand_shallow<T, kRowTiles, kAligned>(part, affine, y_stride, first, second, hidden, y);
  } else {
    expand_deep<T, kRowTiles, kAligned>(part, affine, y_stride, first, second, hidden, y);
  }
}

// Units first_unit .. of the group's slices together; `start` is the slice's first.
template <typename T>
__device__ inline Part<T> make_part(ExpandParams const& params, TableRecord const& record, int4 tile, int slice, int start,
                                    int first_unit, int end_unit) {
  Part<T> part;
  part.row_count = tile.y;
  part.lora_rank = record.lora_rank;
  part.width = params.widths[slice];
  part.first_unit = max(first_unit, start) - start;
  part.end_unit = min(end_unit, params.unit_end[slice]) - start;
  part.chunks = (record.lora_rank + kChunk - 1) / kChunk;
  part.log2_pack = record.lora_rank <= 8 ? 2 : record.lora_rank <= 16 ? 1 : 0;
  part.pitch = round_up(record.lora_rank, kRowAlignment);
  part.scale = record.scale;
  part.b = static_cast<T const*>(params.tables.arena) + record.b_offset + Part<T>::lane_column() * part.pitch + part.lane_k();
  part.y = static_cast<T*>(params.y) + (tile.x + static_cast<int>(threadIdx.x) % 4 * 2) * params.y_stride +
           params.columns[slice] + Part<T>::lane_column();
  return part;
}

// Units [first_unit, end_unit) of all slices together, for one tile.
template <typename T, bool kAligned>
__device__ inline void expand_tile(ExpandParams const& params, int4 tile, int first_unit, int end_unit, int splits, T* hidden,
                                   bool& must_wait) {
  Scratch const& scratch = params.scratch;
  int const row_pitch = params.tables.slices * scratch.max_rank;
  for (int slice = 0; slice < params.tables.slices; ++slice) {
    int const start = slice > 0 ? params.unit_end[slice - 1] : 0;
    if (params.unit_end[slice] <= first_unit || start >= end_unit) continue;
    TableRecord const record = load_record(params.tables, slice, tile.z);
    if (record.lora_rank == 0) continue;
    Part<T> const part = make_part<T>(params, record, tile, slice, start, first_unit, end_unit);
    Affine<T> const affine{static_cast<T const*>(params.tables.arena), record.gain_offset, record.bias_offset};
    HiddenSource const source{scratch.v + static_cast<int64_t>(tile.x) * row_pitch + slice * scratch.max_rank, row_pitch,
                              static_cast<int64_t>(scratch.num_rows) * row_pitch, splits};
    bool const deep = part.chunks > 1;
    int const pack = Part<T>::first_pack();
    WeightChunk first = part.template load<kAligned>(pack, 0);
    WeightChunk second = part.template load<kAligned>(deep ? pack : pack + kExpandWarps, deep ? 1 : 0);
    if (must_wait) wait_for_previous();
    must_wait = false;
    if (part.row_count <= 8) {
      expand_part<T, 1, kAligned>(part, affine, source, params.y_stride, first, second, hidden);
    } else {
      expand_part<T, 2, kAligned>(part, affine, source, params.y_stride, first, second, hidden);
    }
  }
}

// Last of `count` tiles whose cost before it is at most `cost`. All lanes of a warp search together.
__device__ inline int find_tile(int32_t const* plan, int offset, int count, int cost) {
  int first = 0;
  while (count > 1) {
    int const stride = (count + 31) / 32;
    int const index = static_cast<int>(threadIdx.x % 32) * stride;
    bool const fits = index < count && load_item(plan, offset, first + index).w <= cost;
    int const step = (__popc(__ballot_sync(~0u, fits)) - 1) * stride;
    first += step;
    count = min(stride, count - step);
  }
  return first;
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kExpandThreads, kExpandBlocksPerSm)
    expand_kernel(const __grid_constant__ ExpandParams params) {
  __shared__ __align__(16) T hidden[kMaxTileRows * kHiddenPitch];
  start_next();
  int32_t const* const plan = params.tables.plan;
  int const offset = __ldg(plan + kExpandOffset);
  int const num_tiles = __ldg(plan + kNumExpandTiles);
  int const num_units = __ldg(plan + kNumShrinkUnits);
  int const tiles_cost = __ldg(plan + kExpandCost);
  int const units = params.unit_end[params.tables.slices - 1];
  int64_t const blocks = min(static_cast<int64_t>(gridDim.x), (static_cast<int64_t>(num_tiles) * units + 3) / 4);
  if (blockIdx.x >= blocks) {
    wait_for_previous();
    return;
  }
  int64_t const total = static_cast<int64_t>(tiles_cost) * units;
  int64_t const begin = total * blockIdx.x / blocks;
  int64_t const end = total * (blockIdx.x + 1) / blocks;
  int const splits = split_count(params.scratch, num_units, params.tables.slices, params.in_features);
  bool must_wait = true;
  for (int index = find_tile(plan, offset, num_tiles, static_cast<int>(begin / units)); index < num_tiles; ++index) {
    int4 const tile = load_item(plan, offset, index);
    int const next_cost = index + 1 < num_tiles ? load_item(plan, offset, index + 1).w : tiles_cost;
    int64_t const tile_begin = static_cast<int64_t>(tile.w) * units;
    int64_t const tile_end = static_cast<int64_t>(next_cost) * units;
    int const cost = next_cost - tile.w;
    int const first_unit = begin > tile_begin ? static_cast<int>((begin - tile_begin) / cost) : 0;
    int const end_unit = end < tile_end ? static_cast<int>((end - tile_begin) / cost) : units;
    if (first_unit < end_unit) expand_tile<T, kAligned>(params, tile, first_unit, end_unit, splits, hidden, must_wait);
    if (end <= tile_end) break;
  }
  if (must_wait) wait_for_previous();
}

template <typename T>
cudaError_t launch_expand(ExpandParams const& params, LaunchConfig const& config) {
  bool aligned = params.y_stride % 8 == 0 && reinterpret_cast<uintptr_t>(params.y) % 16 == 0;
  for (int slice = 0; slice < params.tables.slices; ++slice) aligned = aligned && params.widths[slice] % 8 == 0;
  auto* const kernel = aligned ? expand_kernel<T, true> : expand_kernel<T, false>;
  return launch(kernel, config.num_sms * kExpandBlocksPerSm, kExpandThreads, params, config);
}

}  // namespace punica
