// lora_expand by asynchronous copies: B and y stream through a ring in shared memory, so that what is on its way is bounded
// by that memory and not by registers, and a warp reads B in whole cache lines.
//
// Few rows: each warp has units and a ring of its own and meets the others only where the low-rank rows are gathered. Many
// rows: the warps of a block share the weights of a unit and each takes 16 rows of the tile.
#pragma once

#include <algorithm>
#include <type_traits>

#include "punica/columns.cuh"
#include "punica/expand_items.cuh"
#include "punica/slab.cuh"

namespace punica {

constexpr int kPassRows = 16;                           // rows of a warp's pass: two row tiles
constexpr int kOutputBytes = kPassRows * kWarpColumns * 2;  // y of a pass and unit

#ifndef PUNICA_FEW_WARPS
#define PUNICA_FEW_WARPS 4
#endif
constexpr int kFewWarps = PUNICA_FEW_WARPS;
constexpr int kFewBlocksPerSm = 8 / kFewWarps;
constexpr int kFewStages = kFewWarps == 4 ? 4 : 3;
constexpr int kFewSlabs = 2;  // of a visit
constexpr int kFewSlotBytes = kFewSlabs * kSlabBytes + kOutputBytes;
constexpr int kFewPitch = (kMaxRank / kSlabRanks | 1) * kSlabRanks;

constexpr int kManyWarps = 4;
constexpr int kManySlabs = 4;
constexpr int kManyStages = 3;
constexpr int kManySlotBytes = kManySlabs * kSlabBytes + kManyWarps * kOutputBytes;
constexpr int kManyBlocksPerSm = 3;

// Elements between two low-rank rows in shared memory: an odd number of 32 bytes, so that lane groups meet different banks.
inline __host__ __device__ int hidden_pitch(int max_rank) {
  return ((max_rank + kSlabRanks - 1) / kSlabRanks | 1) * kSlabRanks;
}

// Units [first_unit, end_unit) of one slice for one tile of rows.
template <typename T>
struct Panel {
  int row_count;
  int lora_rank;
  int width;  // O of the slice
  int first_unit;
  int end_unit;
  int pitch;  // of B
  float scale;
  T const* b;  // B of the slice
  T* y;        // row 0 of the tile, column 0 of the slice
  int64_t y_stride;

  __device__ int steps() const { return (lora_rank + kSlabRanks - 1) / kSlabRanks; }
};

// A visit: some slabs of one unit.
struct Visit {
  int unit;
  int chunk;

  __device__ void advance(int chunks, int stride) {
    if (++chunk < chunks) return;
    chunk = 0;
    unit += stride;
  }
};

// The fp32 sums of a tile's rows: row t of split k starts at v + t * row_pitch + k * split_pitch.
struct SplitRows {
  float const* v;
  int row_pitch;
  int64_t split_pitch;
  int splits;
};

// Sums the splits, kLoads at a time and in order, of rows [0, rows) into `hidden` [num_rows, pitch], rounded to T; zero
// beyond lora_rank and beyond `rows`.
template <int kLoads, int kThreads, typename T>
__device__ inline void gather_rows(T* hidden, int pitch, SplitRows const& source, int lora_rank, int rows, int num_rows) {
  int const quads = (lora_rank + kSlabRanks - 1) / kSlabRanks * (kSlabRanks / 4);
#pragma unroll 1
  for (int index = threadIdx.x; index < num_rows * quads; index += kThreads) {
    int const t = index / quads;
    int const r = index % quads * 4;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    if (t < rows && r < lora_rank) {
      float const* const from = source.v + t * source.row_pitch + r;
#pragma unroll 1
      for (int first = 0; first < source.splits; first += kLoads) {
        float4 terms[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          terms[i] = make_float4(0.f, 0.f, 0.f, 0.f);
          if (first + i < source.splits)
            terms[i] = __ldcg(reinterpret_cast<float4 const*>(from + (first + i) * source.split_pitch));
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i)
          sum = make_float4(sum.x + terms[i].x, sum.y + terms[i].y, sum.z + terms[i].z, sum.w + terms[i].w);
      }
    }
    int const left = lora_rank - r;  // the ranks of a last, partial quad were never written
    uint32_t const low = Convert<T>::pack(left > 0 ? sum.x : 0.f, left > 1 ? sum.y : 0.f);
    uint32_t const high = Convert<T>::pack(left > 2 ? sum.z : 0.f, left > 3 ? sum.w : 0.f);
    *reinterpret_cast<uint2*>(hidden + t * pitch + r) = make_uint2(low, high);
  }
}

// A lane's own part of y for a unit and 16 rows from `first_row` on: eight columns of rows 8 n + 2 q + side. It passes through
// shared memory but no other lane reads it.
template <typename T, bool kAligned>
struct LaneOutput {
  T* y;       // row 2 q of the pass, the lane's first column
  int valid;  // columns
  int rows;   // from 2 q on

  __device__ LaneOutput(Panel<T> const& panel, int unit, int first_row) {
    int const lane = threadIdx.x % 32;
    int const column = unit * kWarpColumns + lane / 4 * 8;
    y = panel.y + (first_row + lane % 4 * 2) * panel.y_stride + column;
    valid = panel.width - column;
    rows = panel.row_count - first_row - lane % 4 * 2;
  }

  static __device__ char* place(char* stage, int n, int side) { return stage + (n * 2 + side) * 512 + threadIdx.x % 32 * 16; }

  __device__ void fetch(char* stage, int64_t y_stride) const {
#pragma unroll
    for (int n = 0; n < kPassRows / 8; ++n)
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        if (n * 8 + side >= rows || valid <= 0) continue;
        T const* const from = y + (n * 8 + side) * y_stride;
        if constexpr (kAligned) {
          copy16_async(place(stage, n, side), from, 16);
        } else {
          *reinterpret_cast<uint4*>(place(stage, n, side)) = to_raw(load8<Source::kActivation, false>(from, valid));
        }
      }
  }

  __device__ void update(char* stage, int64_t y_stride, float const (&acc)[4][kPassRows / 8][4], float scale,
                         Affine<T> const& affine, int column) const {
    if (valid <= 0) return;
#pragma unroll
    for (int n = 0; n < kPassRows / 8; ++n)
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        if (n * 8 + side >= rows) continue;
        Vec8 const before = from_raw(*reinterpret_cast<uint4 const*>(place(stage, n, side)));
        float out[8];
        columns_of<kPassRows / 8>(out, acc, n, side);
#pragma unroll
        for (int i = 0; i < 8; ++i) out[i] = get<T>(before, i) + scale * out[i];
        affine.apply(out, column, valid);
        store8<T, kAligned>(y + (n * 8 + side) * y_stride, out, valid);
      }
  }
};

__device__ inline int lane_column(int unit) { return unit * kWarpColumns + threadIdx.x % 32 / 4 * 8; }

template <typename T, int kStages, bool kAligned>
__device__ inline void expand_few(Panel<T> const& panel, Affine<T> const& affine, SplitRows const& source, char* shared,
                                  bool& must_wait) {
  constexpr int kChunk = kFewSlabs * kSlabRanks;
  int const warp = threadIdx.x / 32;
  char* const ring = shared + warp * kStages * kFewSlotBytes;
  T* const hidden = reinterpret_cast<T*>(shared + kFewWarps * kStages * kFewSlotBytes);
  int const chunks = (panel.lora_rank + kChunk - 1) / kChunk;
  auto const fetch_weights = [&](Visit const& visit, int slot) {
    if (visit.unit >= panel.end_unit) return;
    T const* const b = panel.b + static_cast<int64_t>(visit.unit * kWarpColumns) * panel.pitch + visit.chunk * kChunk;
    int const depth = min(panel.lora_rank - visit.chunk * kChunk, kChunk);
    int const columns = panel.width - visit.unit * kWarpColumns;
    char* const slabs = ring + slot * kFewSlotBytes;
    if (depth <= kSlabRanks) {
      copy_slabs<2, 32>(slabs, b, panel.pitch, columns, depth, threadIdx.x % 32);
    } else {
      copy_slabs<4, 32>(slabs, b, panel.pitch, columns, depth, threadIdx.x % 32);
    }
  };
  auto const fetch_output = [&](Visit const& visit, int slot) {
    if (visit.unit < panel.end_unit && visit.chunk + 1 == chunks)
      LaneOutput<T, kAligned>(panel, visit.unit, 0).fetch(ring + slot * kFewSlotBytes + kFewSlabs * kSlabBytes, panel.y_stride);
  };
  Visit ahead{panel.first_unit + warp, 0};
#pragma unroll 1
  for (int slot = 0; slot < kStages - 1; ++slot) {
    fetch_weights(ahead, slot);
    ahead.advance(chunks, kFewWarps);
  }
  if (must_wait) wait_for_previous();
  must_wait = false;
  Visit visit{panel.first_unit + warp, 0};
#pragma unroll 1
  for (int slot = 0; slot < kStages - 1; ++slot) {
    fetch_output(visit, slot);
    commit_copies();
    visit.advance(chunks, kFewWarps);
  }
  __syncthreads();  // the rows before have been read
  gather_rows<16, 32 * kFewWarps>(hidden, kFewPitch, source, panel.lora_rank, panel.row_count, round_up(panel.row_count, 8));
  __syncthreads();
  float acc[4][kPassRows / 8][4] = {};
  int slot = 0;
#pragma unroll 1
  for (visit = {panel.first_unit + warp, 0}; visit.unit < panel.end_unit; visit.advance(chunks, kFewWarps)) {
    wait_copies<kStages - 2>();
    __syncwarp();  // all lanes' copies have arrived, and the slot before has been read
    int const free = slot == 0 ? kStages - 1 : slot - 1;
    fetch_weights(ahead, free);
    fetch_output(ahead, free);
    commit_copies();
    ahead.advance(chunks, kFewWarps);
    char* const stage = ring + slot * kFewSlotBytes;
    int const steps = panel.steps() - visit.chunk * kFewSlabs;
#pragma unroll 1
    for (int s = 0; s < min(steps, kFewSlabs); ++s)
      multiply_slab<T, kPassRows / 8>(acc, stage + s * kSlabBytes, hidden + (visit.chunk * kFewSlabs + s) * kSlabRanks,
                                      kFewPitch, panel.row_count > 8 ? 2 : 1);
    if (visit.chunk + 1 == chunks) {
      LaneOutput<T, kAligned>(panel, visit.unit, 0)
          .update(stage + kFewSlabs * kSlabBytes, panel.y_stride, acc, panel.scale, affine, lane_column(visit.unit));
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int n = 0; n < kPassRows / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[m][n][i] = 0.f;
    }
    slot = slot + 1 == kStages ? 0 : slot + 1;
  }
  __syncwarp();
}

template <typename T, bool kAligned>
__device__ inline void expand_many(Panel<T> const& panel, Affine<T> const& affine, SplitRows const& source, char* shared,
                                   int pitch, bool& must_wait) {
  constexpr int kChunk = kManySlabs * kSlabRanks;
  int const warp = threadIdx.x / 32;
  int const row = warp * kPassRows;
  T* const hidden = reinterpret_cast<T*>(shared + kManyStages * kManySlotBytes);
  int const chunks = (panel.lora_rank + kChunk - 1) / kChunk;
  auto const output_of = [&](int slot) {
    return shared + slot * kManySlotBytes + kManySlabs * kSlabBytes + warp * kOutputBytes;
  };
  auto const fetch_weights = [&](Visit const& visit, int slot) {
    if (visit.unit >= panel.end_unit) return;
    T const* const b = panel.b + static_cast<int64_t>(visit.unit * kWarpColumns) * panel.pitch + visit.chunk * kChunk;
    copy_slabs<32 * kManyWarps>(shared + slot * kManySlotBytes, b, panel.pitch, panel.width - visit.unit * kWarpColumns,
                               min(panel.lora_rank - visit.chunk * kChunk, kChunk), threadIdx.x);
  };
  auto const fetch_output = [&](Visit const& visit, int slot) {
    if (visit.unit < panel.end_unit && visit.chunk + 1 == chunks)
      LaneOutput<T, kAligned>(panel, visit.unit, row).fetch(output_of(slot), panel.y_stride);
  };
  __syncthreads();  // the part before has been read
  Visit ahead{panel.first_unit, 0};
#pragma unroll 1
  for (int slot = 0; slot < kManyStages - 1; ++slot) {
    fetch_weights(ahead, slot);
    ahead.advance(chunks, 1);
  }
  if (must_wait) wait_for_previous();
  must_wait = false;
  Visit visit{panel.first_unit, 0};
#pragma unroll 1
  for (int slot = 0; slot < kManyStages - 1; ++slot) {
    fetch_output(visit, slot);
    commit_copies();
    visit.advance(chunks, 1);
  }
  gather_rows<4, 32 * kManyWarps>(hidden, pitch, source, panel.lora_rank, panel.row_count,
                                  round_up(panel.row_count, kPassRows));
  float acc[4][kPassRows / 8][4] = {};
  int slot = 0;
#pragma unroll 1
  for (visit = {panel.first_unit, 0}; visit.unit < panel.end_unit; visit.advance(chunks, 1)) {
    wait_copies<kManyStages - 2>();
    __syncthreads();  // all copies have arrived, the slot before has been read, and the low-rank rows are there
    int const free = slot == 0 ? kManyStages - 1 : slot - 1;
    fetch_weights(ahead, free);
    fetch_output(ahead, free);
    commit_copies();
    ahead.advance(chunks, 1);
    if (row < panel.row_count) {
      int const steps = min(panel.steps() - visit.chunk * kManySlabs, kManySlabs);
#pragma unroll 1
      for (int s = 0; s < steps; ++s)
        multiply_slab<T, kPassRows / 8>(acc, shared + slot * kManySlotBytes + s * kSlabBytes,
                                        hidden + row * pitch + (visit.chunk * kManySlabs + s) * kSlabRanks, pitch, 2);
      if (visit.chunk + 1 == chunks) {
        LaneOutput<T, kAligned>(panel, visit.unit, row)
            .update(output_of(slot), panel.y_stride, acc, panel.scale, affine, lane_column(visit.unit));
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
          for (int n = 0; n < kPassRows / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[m][n][i] = 0.f;
      }
    }
    slot = slot + 1 == kManyStages ? 0 : slot + 1;
  }
}

template <typename T>
__device__ inline Panel<T> make_panel(ExpandParams const& params, ExpandItem const& item) {
  int const start = item.slice > 0 ? params.unit_end[item.slice - 1] : 0;
  Panel<T> panel;
  panel.row_count = item.tile.y;
  panel.lora_rank = item.record.lora_rank;
  panel.width = params.widths[item.slice];
  panel.first_unit = item.first_unit - start;
  panel.end_unit = min(item.end_unit, params.unit_end[item.slice]) - start;
  panel.pitch = round_up(panel.lora_rank, kRowAlignment);
  panel.scale = item.record.scale;
  panel.b = static_cast<T const*>(params.tables.arena) + item.record.b_offset;
  panel.y = static_cast<T*>(params.y) + item.tile.x * params.y_stride + params.columns[item.slice];
  panel.y_stride = params.y_stride;
  return panel;
}

// The part of an item that lies in one slice. kStages: of the ring for few rows; 0: many rows.
template <typename T, int kStages, bool kAligned>
__device__ inline void stream_slice(ExpandParams const& params, ExpandItem const& item, int splits, char* shared,
                                    bool& must_wait) {
  if (item.record.lora_rank == 0) return;
  Scratch const& scratch = params.scratch;
  int const row_pitch = params.tables.slices * scratch.max_rank;
  Panel<T> const panel = make_panel<T>(params, item);
  Affine<T> const affine{static_cast<T const*>(params.tables.arena), item.record.gain_offset, item.record.bias_offset};
  SplitRows const source{scratch.v + static_cast<int64_t>(item.tile.x) * row_pitch + item.slice * scratch.max_rank, row_pitch,
                         static_cast<int64_t>(scratch.num_rows) * row_pitch, splits};
  if constexpr (kStages == 0) {
    expand_many<T, kAligned>(panel, affine, source, shared, hidden_pitch(scratch.max_rank), must_wait);
  } else {
    expand_few<T, kStages, kAligned>(panel, affine, source, shared, must_wait);
  }
}

// kStages as for stream_slice.
constexpr int stream_threads(int stages) { return 32 * (stages == 0 ? kManyWarps : kFewWarps); }

template <typename T, int kStages, bool kAligned>
__global__ void __launch_bounds__(stream_threads(kStages), kStages == 0 ? kManyBlocksPerSm : kFewBlocksPerSm)
    expand_stream_kernel(const __grid_constant__ ExpandParams params) {
  char* const shared = dynamic_shared();
  start_next();
  int32_t const* const plan = params.tables.plan;
  WorkList const work = load_work_list(plan);
  Cut const cut = make_cut(params, work.num_shares, max(work.least_shares, 1), kStages == 0 ? kManyWarps : kFewWarps);
  int const num_items = work.num_shares * cut.items_a_share;
  int const stride = gridDim.x;
  auto const load_tile = [&](int index) {
    return load_item(plan, work.shares_offset, min(index, num_items - 1) / cut.items_a_share);
  };
  bool must_wait = true;
  if (blockIdx.x < num_items) {
    int4 tile = load_tile(blockIdx.x);
    int const splits = split_count(params.scratch, work.num_units, params.tables.slices, params.in_features);
    for (int index = blockIdx.x; index < num_items; index += stride) {
      ExpandItem item = make_item(params, cut, tile, index);
      tile = load_tile(index + stride);
      stream_slice<T, kStages, kAligned>(params, item, splits, shared, must_wait);
      while (params.unit_end[item.slice] < item.end_unit) {
        item.first_unit = params.unit_end[item.slice++];
        item.record = load_record(params.tables, item.slice, item.tile.z);
        stream_slice<T, kStages, kAligned>(params, item, splits, shared, must_wait);
      }
    }
  }
  if (must_wait) wait_for_previous();
}

constexpr int few_bytes(int stages) {
  return kFewWarps * stages * kFewSlotBytes + kPassRows * kFewPitch * 2;
}

template <typename T, int kStages>
cudaError_t launch_expand_stream_kernel(ExpandParams const& params, LaunchConfig const& config, int shared_bytes,
                                        int blocks_per_sm) {
  bool aligned = params.y_stride % 8 == 0 && reinterpret_cast<uintptr_t>(params.y) % 16 == 0;
  for (int slice = 0; slice < params.tables.slices; ++slice) aligned = aligned && params.widths[slice] % 8 == 0;
  auto* const kernel = aligned ? expand_stream_kernel<T, kStages, true> : expand_stream_kernel<T, kStages, false>;
  return launch(kernel, config.num_sms * blocks_per_sm, stream_threads(kStages), params, config, shared_bytes);
}

template <typename T>
cudaError_t launch_expand_stream(ExpandParams const& params, LaunchConfig const& config) {
  int device = 0;
  int block_bytes = 0;  // at most, of a block and of a multiprocessor
  int sm_bytes = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&block_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&sm_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  if (error != cudaSuccess) return error;
  auto const blocks = [&](int bytes, int most) { return std::max(1, std::min(most, sm_bytes / (bytes + 1024))); };
  if (params.scratch.num_rows > kMaxDecodeRows) {
    int const bytes = kManyStages * kManySlotBytes + kMaxTileRows * hidden_pitch(params.scratch.max_rank) * 2;
    return launch_expand_stream_kernel<T, 0>(params, config, bytes, blocks(bytes, kManyBlocksPerSm));
  }
  auto const few = [&](auto stages) {
    constexpr int kBytes = few_bytes(decltype(stages)::value);
    return launch_expand_stream_kernel<T, decltype(stages)::value>(params, config, kBytes, blocks(kBytes, kFewBlocksPerSm));
  };
  if (few_bytes(kFewStages) <= block_bytes) return few(std::integral_constant<int, kFewStages>());
  return few(std::integral_constant<int, kFewStages - 1>());
}

}  // namespace punica
