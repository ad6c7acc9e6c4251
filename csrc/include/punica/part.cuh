// What a block of lora_expand works on: some columns of one slice for one tile of rows.
#pragma once

#include "punica/columns.cuh"
#include "punica/expand_items.cuh"

namespace punica {

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

// Sums the splits of v, kLoads at a time, for the part's rows into `hidden` [rows, kHiddenPitch], rounded to T; zero beyond lora_rank and up to
// `num_rows` rows.
template <int kLoads, typename T>
__device__ inline void gather_hidden(T* hidden, HiddenSource const& source, Part<T> const& part, int num_rows) {
  int const quads = part.chunks * (kChunk / 4);
  for (int index = threadIdx.x; index < num_rows * quads; index += kExpandThreads) {
    int const t = index / quads;
    int const r = index % quads * 4;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    if (t < part.row_count && r < part.lora_rank) {
      float const* const v = source.v + t * source.row_pitch + r;
#pragma unroll kLoads
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

}  // namespace punica
