// lora_expand for steps of few rows: bandwidth goes to the weights, which stream through two register buffers.
#pragma once

#include "punica/part.cuh"

namespace punica {

constexpr int kDecodeGroups = 2;  // row groups of 8 rows whose output is loaded at once

// The output of the next pack's units, first 8 rows: loaded in place well before its use.
struct HeldOutput {
  Vec8 y[2][1][2];
};

template <typename T, bool kAligned>
__device__ inline void load_held(HeldOutput& held, Part<T> const& part, int64_t y_stride, int pack) {
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    int const unit = p >> part.log2_pack ? part.end_unit : part.first_unit + (pack << part.log2_pack) + p;
    load_output<T, 1, kAligned>(held.y[p], part, y_stride, unit, 0);
  }
}

// One pack whose K fits one chunk.
template <typename T, bool kAligned>
__device__ inline void expand_pack(Part<T> const& part, Affine<T> const& affine, int64_t y_stride, WeightChunk const& weights,
                                   HeldOutput const& held, T const* hidden, int pack) {
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    if (p >> part.log2_pack) continue;
    int const unit = part.first_unit + (pack << part.log2_pack) + p;
    Vec8 y[kDecodeGroups][1][2];
#pragma unroll
    for (int group = 1; group < kDecodeGroups; ++group)
      load_output<T, 1, kAligned>(y[group], part, y_stride, unit, group * 8);
#pragma unroll
    for (int group = 0; group < kDecodeGroups; ++group) {
      int const row = group * 8;
      if (row >= part.row_count) continue;
      float acc[4][1][4] = {};
      Vec8 rows[1];
      load_hidden<T, 1>(rows, hidden, part, row, 0, p);
      multiply<T, 1>(acc, weights, rows);
      if (group == 0) {
        store_output<T, 1, kAligned>(acc, held.y[p], part, affine, y_stride, unit, row);
      } else {
        store_output<T, 1, kAligned>(acc, y[group], part, affine, y_stride, unit, row);
      }
    }
  }
}

// lora_rank up to 32: the buffers hold alternate packs.
template <typename T, bool kAligned>
__device__ inline void expand_shallow(Part<T> const& part, Affine<T> const& affine, int64_t y_stride, WeightChunk& first,
                                      WeightChunk& second, HeldOutput& held, T const* hidden) {
  int const packs = part.num_packs();
  for (int pack = Part<T>::first_pack(); pack < packs; pack += 2 * kExpandWarps) {
    expand_pack<T, kAligned>(part, affine, y_stride, first, held, hidden, pack);
    load_held<T, kAligned>(held, part, y_stride, pack + kExpandWarps);
    first = part.template load<kAligned>(pack + 2 * kExpandWarps, 0);
    if (pack + kExpandWarps >= packs) break;
    expand_pack<T, kAligned>(part, affine, y_stride, second, held, hidden, pack + kExpandWarps);
    load_held<T, kAligned>(held, part, y_stride, pack + 2 * kExpandWarps);
    second = part.template load<kAligned>(pack + 3 * kExpandWarps, 0);
  }
}

// lora_rank above 32: the buffers hold even and odd chunks of one unit, reloaded while the other is in use; up to 64, where
// two chunks are all, only after the last row group.
template <typename T, bool kAligned>
__device__ inline void expand_deep(Part<T> const& part, Affine<T> const& affine, int64_t y_stride, WeightChunk& first,
                                   WeightChunk& second, HeldOutput& held, T const* hidden) {
  int const packs = part.num_packs();
  for (int pack = Part<T>::first_pack(); pack < packs; pack += kExpandWarps) {
    int const unit = part.first_unit + pack;
    Vec8 y[kDecodeGroups][1][2];
#pragma unroll
    for (int group = 1; group < kDecodeGroups; ++group)
      load_output<T, 1, kAligned>(y[group], part, y_stride, unit, group * 8);
#pragma unroll
    for (int group = 0; group < kDecodeGroups; ++group) {
      int const row = group * 8;
      if (row >= part.row_count) continue;
      bool const last_group = row + 8 >= part.row_count;
      bool const reload = part.chunks > 2 || last_group;
      float acc[4][1][4] = {};
      for (int chunk = 0; chunk < part.chunks; chunk += 2) {
        bool const last = chunk + 2 >= part.chunks;
        int const from_pack = last && last_group ? pack + kExpandWarps : pack;
        int const from_chunk = last ? 0 : chunk + 2;
        Vec8 rows[1];
        load_hidden<T, 1>(rows, hidden, part, row, chunk, 0);
        multiply<T, 1>(acc, first, rows);
        if (reload) first = part.template load<kAligned>(from_pack, from_chunk);
        if (chunk + 1 < part.chunks) {
          load_hidden<T, 1>(rows, hidden, part, row, chunk + 1, 0);
          multiply<T, 1>(acc, second, rows);
        }
        if (reload) second = part.template load<kAligned>(from_pack, from_chunk + 1);
      }
      if (group == 0) {
        store_output<T, 1, kAligned>(acc, held.y[0], part, affine, y_stride, unit, row);
        load_held<T, kAligned>(held, part, y_stride, pack + kExpandWarps);
      } else {
        store_output<T, 1, kAligned>(acc, y[group], part, affine, y_stride, unit, row);
      }
    }
  }
}

template <typename T, int kLoads, bool kAligned>
__device__ inline void expand_decode_part(Part<T> const& part, Affine<T> const& affine, HiddenSource const& source,
                                   int64_t y_stride, T* hidden, bool& must_wait) {
  bool const deep = part.chunks > 1;
  int const pack = Part<T>::first_pack();
  WeightChunk first = part.template load<kAligned>(pack, 0);
  WeightChunk second = part.template load<kAligned>(deep ? pack : pack + kExpandWarps, deep ? 1 : 0);
  if (must_wait) wait_for_previous();
  must_wait = false;
  HeldOutput held;
  load_held<T, kAligned>(held, part, y_stride, pack);
  __syncthreads();  // the part before has been read
  gather_hidden<kLoads>(hidden, source, part, round_up(part.row_count, 8));
  __syncthreads();
  if (deep) {
    expand_deep<T, kAligned>(part, affine, y_stride, first, second, held, hidden);
  } else {
    expand_shallow<T, kAligned>(part, affine, y_stride, first, second, held, hidden);
  }
}

}  // namespace punica
