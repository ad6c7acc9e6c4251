// What a block of lora_expand does for a part.
//
// The inner loop is short on purpose. Where rows are few, instructions are what a pack costs beside its bytes; and between the base
// products of a model, which stream more than the caches hold, a kernel's instructions come from memory like its data.
#pragma once

#include "punica/part.cuh"

namespace punica {

// Warps that share a part's columns have the same rows; tiles of more than sixteen rows are dealt out to two or four groups of them.
struct WarpPlace {
  int first_row;
  int first_pack;
  int packs_a_step;  // from one pack of the warp to the next

  __device__ explicit WarpPlace(int row_count) {
    int const log2_groups = row_count <= kWarpRows ? 0 : row_count <= 2 * kWarpRows ? 1 : 2;
    int const warp = threadIdx.x / 32;
    first_row = (warp & ((1 << log2_groups) - 1)) * kWarpRows;
    first_pack = warp >> log2_groups;
    packs_a_step = kExpandWarps >> log2_groups;
  }
};

constexpr int kRunColumns = 32;  // of a unit, that a warp does at a time

// Four loads of a lane: four columns of a run by 32 elements of K.
struct RunWeights {
  Vec8 row[4];
};

// The weights of a warp's packs, a run at a time. A lane's 16 bytes of a row of B are the column operand of two tensor core instructions as they come
// from memory, and the four rows that it loads are chosen so that it ends with eight consecutive columns of y: lane group g loads the columns
// 8 (g / 2) + g % 2 + 0, 2, 4 and 6 of the run.
template <typename T, bool kAligned>
struct WeightStream {
  char const* b;         // of the slice
  int column;            // the first of the lane group's four in run 0
  int limit;             // one past the last column
  uint32_t pitch_bytes;
  int lora_rank;
  int lane_k;

  __device__ WeightStream(Part<T> const& part, int first_column, int end_column)
      : b(reinterpret_cast<char const*>(part.b)),
        column(first_column + part.lane_unit() * kWarpColumns + static_cast<int>(threadIdx.x) % 32 / 8 * 8 + static_cast<int>(threadIdx.x) / 4 % 2),
        limit(end_column),
        pitch_bytes(part.pitch * sizeof(T)),
        lora_rank(part.lora_rank),
        lane_k(part.lane_k()) {}

  // Zeroes what lies beyond lora_rank.
  __device__ void mask(RunWeights& out, int chunk) const {
    int const k = chunk * kChunk + lane_k;
#pragma unroll
    for (int i = 0; i < 4; ++i) keep_first(out.row[i], lora_rank - (k < lora_rank ? k : 0));
  }

  // `ahead` columns beyond the stream's place. kPartial: lora_rank may be no multiple of 8. Lanes beyond the last column or lora_rank load what others do: it is multiplied with zero, or nobody
  // stores the product.
  template <bool kPartial>
  __device__ void load(RunWeights& out, int ahead, int chunk) const {
    int const wanted = chunk * kChunk + lane_k;
    int const k = wanted < lora_rank ? wanted : 0;
    char const* const base = b + static_cast<uint32_t>(k * sizeof(T));
    int const first = column + ahead;
    if constexpr (kAligned) {
      char const* const from = base + static_cast<uint64_t>(pitch_bytes) * static_cast<uint32_t>(first < limit ? first : 0);
#pragma unroll
      for (int i = 0; i < 4; ++i) out.row[i] = from_raw(load16_now(from + static_cast<uint64_t>(pitch_bytes) * (2u * i)));
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        auto const row = static_cast<uint32_t>(min(first + 2 * i, limit - 1));
        out.row[i] = from_raw(load16_now(base + static_cast<uint64_t>(pitch_bytes) * row));
      }
    }
    if constexpr (kPartial) mask(out, chunk);
  }
};

template <typename T>
__device__ inline TileRows load_tile_rows(Part<T> const& part, Hidden<T> const& hidden, int first_row, int chunk) {
  int const rank = chunk * kChunk + part.lane_k();
  TileRows out;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    PackedRow const at(part, first_row, half);
    Vec8 const words = hidden.load(at.own && at.row < part.row_count && rank < part.lora_rank, at.row, rank);
#pragma unroll
    for (int k = 0; k < 4; ++k) out.word[k / 2][k % 2 * 2 + half] = words.word[k];
  }
  return out;
}

// Sums of a run: of tile rows g and g + 8, the columns 8 q + 2 i and 8 q + 2 i + 1.
struct RunSums {
  float d[4][4] = {};
};

template <typename T>
__device__ inline void multiply_rows(RunSums& sums, TileRows const& rows, RunWeights const& weights) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int k = 0; k < 2; ++k)
      mma_16x8x16<T>(sums.d[i], rows.word[k][0], rows.word[k][1], rows.word[k][2], rows.word[k][3], weights.row[i].word[2 * k],
                     weights.row[i].word[2 * k + 1]);
}

// y of a lane in one run: eight columns of each of its tile rows.
struct RunOutput {
  Vec8 half[2];
};

// Where a lane's sums go.
template <typename T, bool kAligned>
struct OutputStream {
  T* y;          // half 0, run 0
  int column;    // of the slice, likewise
  int left[2];   // columns from there on, by half; none if the half has no row
  int64_t step;  // elements from half 0 to half 1
  int columns;   // likewise

  __device__ OutputStream(Part<T> const& part, int64_t y_stride, int first_row, int first_column, int end_column) {
    int const lane = threadIdx.x % 32;
    int const row = first_row + (lane / 4 & ((kWarpRows >> part.log2_pack) - 1));
    int const unit = lane / 4 >> (4 - part.log2_pack);
    bool const packed = part.log2_pack > 0;  // then both halves are one row's
    column = first_column + unit * kWarpColumns + lane % 4 * 8;
    columns = packed ? kWarpColumns << (part.log2_pack - 1) : 0;
    step = packed ? columns : 8 * y_stride;
    y = part.y + row * y_stride + column;
    left[0] = row < part.row_count ? end_column - column : 0;
    left[1] = row + (packed ? 0 : 8) < part.row_count ? end_column - column - columns : 0;
  }

  __device__ void advance(int num_columns) {
    y += num_columns;
    column += num_columns;
    left[0] -= num_columns;
    left[1] -= num_columns;
  }

  __device__ void load(RunOutput& out, int ahead) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      T const* const from = y + half * step + ahead;
      int const valid = left[half] - ahead;
      if constexpr (kAligned) {
        if (valid > 0) out.half[half] = from_raw(load16<Source::kActivation>(from));
      } else {
        out.half[half] = load8<Source::kActivation, false>(from, valid);
      }
    }
  }

  // kAffine: the adapter has a gain or a bias.
  template <bool kAffine>
  __device__ void store(RunSums const& sums, RunOutput const& held, float scale, Affine<T> const& affine, int ahead) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const valid = left[half] - ahead;
      if (valid <= 0) continue;
      float out[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) out[i] = get<T>(held.half[half], i) + scale * sums.d[i / 2][half * 2 + i % 2];
      if constexpr (kAffine) affine.apply(out, column + half * columns + ahead, valid);
      store8<T, kAligned>(y + half * step + ahead, out, valid);
    }
  }
};

// How many chunks of K there are: what the two double buffers of weights hold follows from it.
enum class Depth {
  kOne,   // of each of the pack's two runs, the only chunk; half of each buffer is not used
  kTwo,   // of each of the pack's two runs, both chunks
  kMany,  // of one run, chunks 4 i and 4 i + 1, and 4 i + 2 and 4 i + 3
};

__device__ inline Depth depth_of(int chunks) { return chunks == 1 ? Depth::kOne : chunks == 2 ? Depth::kTwo : Depth::kMany; }

constexpr int kMaxHeld = 4;

template <Depth kDepth>
constexpr int kHeld = kDepth == Depth::kOne ? kMaxHeld : 2;  // runs whose y is on its way

struct WarpWeights {
  RunWeights buffer[2][2];  // [as Depth says][chunk]
};

// All that can be asked for of a warp's first pack.
template <typename T, bool kAligned>
__device__ inline void load_first(WarpWeights& weights, WeightStream<T, kAligned> const& stream, Depth depth) {
  stream.template load<false>(weights.buffer[0][0], 0, 0);
  if (depth == Depth::kOne) {
    stream.template load<false>(weights.buffer[1][0], kRunColumns, 0);
  } else {
    int const ahead = depth == Depth::kTwo ? kRunColumns : 0;
    int const chunk = depth == Depth::kTwo ? 0 : 2;
    stream.template load<false>(weights.buffer[0][1], 0, 1);
    stream.template load<false>(weights.buffer[1][0], ahead, chunk);
    stream.template load<false>(weights.buffer[1][1], ahead, chunk + 1);
  }
}

// Sums of run `kRun` of the warp's pack. Every buffer is reloaded as soon as it has been used, with what it holds next.
template <Depth kDepth, bool kGeneral, int kRun, typename T, bool kAligned>
__device__ inline RunSums run_sums(Part<T> const& part, WeightStream<T, kAligned> const& stream, WarpWeights& weights, TileRows const (&rows)[2],
                                   Staged const& staged, int first_row, int columns) {
  RunSums sums;
  int const ahead = columns + kRun * kRunColumns;  // this run of the next pack
  if constexpr (kDepth == Depth::kOne) {
    multiply_rows<T>(sums, rows[0], weights.buffer[kRun][0]);
    stream.template load<kGeneral>(weights.buffer[kRun][0], ahead, 0);
  } else if constexpr (kDepth == Depth::kTwo) {
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
      multiply_rows<T>(sums, rows[chunk], weights.buffer[kRun][chunk]);
      stream.template load<kGeneral>(weights.buffer[kRun][chunk], ahead, chunk);
    }
  } else {
#pragma unroll 1
    for (int start = 0; start < part.chunks; start += 4) {
      bool const last = start + 4 >= part.chunks;
      int const from = last ? (kRun == 0 ? kRunColumns : columns) : kRun * kRunColumns;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int const chunk = start + i;
        RunWeights& buffer = weights.buffer[i / 2][i % 2];
        if (kGeneral && part.chunks <= 2) {
          if (chunk < part.chunks) multiply_rows<T>(sums, rows[i % 2], buffer);
        } else if (chunk < part.chunks) {
          multiply_rows<T>(sums, staged.rows(part.chunks, first_row / kWarpRows, chunk), buffer);
        }
        stream.template load<kGeneral>(buffer, from, last ? i : chunk + 4);
      }
    }
  }
  return sums;
}

// A warp's packs, run by run.
//
// kGeneral: lora_rank may be no multiple of 8, and there may be a gain or a bias. What that takes would lengthen everyone's loop.
template <Depth kDepth, bool kGeneral, typename T, bool kAligned>
__device__ inline void expand_packs(Part<T> const& part, WeightStream<T, kAligned>& stream, OutputStream<T, kAligned>& output,
                                    Affine<T> const& affine, TileRows const (&rows)[2], Staged const& staged, int first_row, int columns, int left,
                                    WarpWeights& weights, RunOutput (&held)[kMaxHeld]) {
  constexpr int kRuns = kHeld<kDepth>;
#pragma unroll
  for (int i = 2; i < kRuns; ++i) output.load(held[i], i / 2 * columns + i % 2 * kRunColumns);
#pragma unroll 1
  while (true) {
#pragma unroll
    for (int i = 0; i < kRuns; i += 2) {
      RunSums const first = run_sums<kDepth, kGeneral, 0>(part, stream, weights, rows, staged, first_row, columns);
      output.template store<kGeneral>(first, held[i], part.scale, affine, 0);
      output.load(held[i], kRuns / 2 * columns);
      RunSums const second = run_sums<kDepth, kGeneral, 1>(part, stream, weights, rows, staged, first_row, columns);
      output.template store<kGeneral>(second, held[i + 1], part.scale, affine, kRunColumns);
      output.load(held[i + 1], kRuns / 2 * columns + kRunColumns);
      stream.column += columns;
      output.advance(columns);
      left -= columns;
      if (left <= 0) return;
    }
  }
}

// kSummed: shrink has summed the splits.
template <typename T, bool kAligned, bool kSummed>
__device__ inline void expand_part(Part<T> const& part, Affine<T> const& affine, Hidden<T> const& hidden, int64_t y_stride, Staged& staged,
                                   bool& must_wait) {
  WarpPlace const place(part.row_count);
  int const first_column = (part.first_unit + (place.first_pack << part.log2_pack)) * kWarpColumns;
  int const end_column = min(part.width, part.end_unit * kWarpColumns);
  int const columns = (place.packs_a_step << part.log2_pack) * kWarpColumns;
  bool const general = part.lora_rank % 8 != 0 || affine.gain_offset >= 0 || affine.bias_offset >= 0;
  Depth const depth = general ? Depth::kMany : depth_of(part.chunks);
  WeightStream<T, kAligned> stream(part, first_column, end_column);
  OutputStream<T, kAligned> output(part, y_stride, place.first_row, first_column, end_column);
  WarpWeights weights;
  RunOutput held[kMaxHeld] = {};
  load_first(weights, stream, depth);
  if (must_wait) wait_for_previous();
  must_wait = false;
  output.load(held[0], 0);
  output.load(held[1], kRunColumns);
  TileRows rows[2];
  if (!kSummed || part.chunks > 2) {
    __syncthreads();  // the part before has been read
    if constexpr (kSummed) {
      staged.fill<kExpandThreads>(hidden, part);
    } else {
      staged.sum<kExpandThreads>(hidden, part);
    }
    __syncthreads();
  }
#pragma unroll
  for (int chunk = 0; chunk < 2; ++chunk) {
    if constexpr (kSummed) {
      if (part.chunks <= 2) rows[chunk] = load_tile_rows(part, hidden, place.first_row, chunk);
    } else {
      int const existing = chunk < part.chunks ? chunk : 0;
      rows[chunk] = part.log2_pack > 0 ? staged.packed_rows(part, place.first_row, existing)
                                       : staged.rows(part.chunks, place.first_row / kWarpRows, existing);
    }
  }
  int const left = place.first_row < part.row_count ? end_column - first_column : 0;
  if (left <= 0) return;
  if (depth == Depth::kOne) {
    expand_packs<Depth::kOne, false>(part, stream, output, affine, rows, staged, place.first_row, columns, left, weights, held);
  } else if (depth == Depth::kTwo) {
    expand_packs<Depth::kTwo, false>(part, stream, output, affine, rows, staged, place.first_row, columns, left, weights, held);
  } else if (!general) {
    expand_packs<Depth::kMany, false>(part, stream, output, affine, rows, staged, place.first_row, columns, left, weights, held);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) stream.mask(weights.buffer[i / 2][i % 2], i);
    expand_packs<Depth::kMany, true>(part, stream, output, affine, rows, staged, place.first_row, columns, left, weights, held);
  }
}

}  // namespace punica
