// y = gain * (scale * x W^T) + bias: a full matrix of the segment's own.
//
// One work item is (tile, chunk): at most 64 rows of one segment by 256 output columns, the whole of K.
#pragma once

#include "punica/columns.cuh"

namespace punica {

constexpr int kGemmColumns = 256;  // output columns of one work item
constexpr int kGemmThreads = kGemmColumns / kWarpColumns * 32;
constexpr int kGemmBlocksPerSm = 3;

template <typename T, bool kAligned>
__device__ inline void load_rows(Vec8 (&rows)[2], SegmentGemmParams const& params, int4 tile, int first_row, int chunk) {
  int const lane = threadIdx.x % 32;
  int const k = chunk * kChunk + lane % 4 * 8;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    int const t = first_row + n * 8 + lane / 4;
    rows[n] = load8<Source::kActivation, kAligned>(static_cast<T const*>(params.x) + (tile.x + t) * params.x_stride + k,
                                                   t < tile.y ? params.in_features - k : 0);
  }
}

template <typename T, bool kAligned>
__device__ inline void store_rows(float const (&acc)[4][2][4], SegmentGemmParams const& params, TableRecord const& record,
                                  int4 tile, int first_row, int first_column) {
  int const lane = threadIdx.x % 32;
  int const column = first_column + lane / 4 * 8;
  int const valid = params.out_features - column;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      int const t = first_row + n * 8 + lane % 4 * 2 + side;
      if (t >= tile.y || valid <= 0) continue;
      float out[8];
      columns_of<2>(out, acc, n, side);
#pragma unroll
      for (int i = 0; i < 8; ++i) out[i] *= record.scale;
      Affine<T>{static_cast<T const*>(params.tables.arena), record.gain_offset, record.bias_offset}.apply(out, column, valid);
      store8<T, kAligned>(static_cast<T*>(params.y) + (tile.x + t) * params.y_stride + column, out, valid);
    }
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kGemmThreads, kGemmBlocksPerSm) segment_gemm_kernel(const __grid_constant__ SegmentGemmParams params) {
  start_next();
  wait_for_previous();
  int32_t const* const plan = params.tables.plan;
  WorkList const work = load_work_list(plan);
  int const num_columns = (params.out_features + kGemmColumns - 1) / kGemmColumns;
  int const num_items = work.num_shares * num_columns;
  int const chunks = (params.in_features + kChunk - 1) / kChunk;
  for (int index = blockIdx.x; index < num_items; index += gridDim.x) {
    int4 const tile = load_item(plan, work.shares_offset, index / num_columns);
    if ((tile.w & 0xffff) != 0) continue;  // once a tile
    TableRecord const record = load_record(params.tables, 0, tile.z);
    if (record.lora_rank == 0) continue;
    int const column = index % num_columns * kGemmColumns + threadIdx.x / 32 * kWarpColumns;
    int const lane_column = column + threadIdx.x % 32 / 4 * 8;
    int const pitch = round_up(params.in_features, kRowAlignment);
    T const* const w = static_cast<T const*>(params.tables.arena) + record.b_offset + static_cast<int64_t>(lane_column) * pitch;
    auto const load_chunk = [&](int chunk) {
      int const k = chunk * kChunk + threadIdx.x % 4 * 8;
      return load_weights<kAligned>(w + k, pitch, params.out_features - lane_column, params.in_features - k);
    };
    for (int row = 0; row < tile.y; row += 16) {
      float acc[4][2][4] = {};
      WeightChunk current = load_chunk(0);
      Vec8 rows[2];
      load_rows<T, kAligned>(rows, params, tile, row, 0);
      for (int chunk = 0; chunk < chunks; ++chunk) {
        WeightChunk const next = load_chunk(chunk + 1);
        Vec8 next_rows[2];
        load_rows<T, kAligned>(next_rows, params, tile, row, chunk + 1);
        multiply<T, 2>(acc, current, rows);
        current = next;
        rows[0] = next_rows[0], rows[1] = next_rows[1];
      }
      store_rows<T, kAligned>(acc, params, record, tile, row, column);
    }
  }
}

template <typename T>
cudaError_t launch_segment_gemm(SegmentGemmParams const& params, LaunchConfig const& config) {
  bool const aligned = params.in_features % 8 == 0 && params.x_stride % 8 == 0 && params.out_features % 8 == 0 &&
                       params.y_stride % 8 == 0 && reinterpret_cast<uintptr_t>(params.x) % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(params.y) % 16 == 0;
  auto* const kernel = aligned ? segment_gemm_kernel<T, true> : segment_gemm_kernel<T, false>;
  return launch(kernel, config.num_sms * kGemmBlocksPerSm, kGemmThreads, params, config);
}

}  // namespace punica
