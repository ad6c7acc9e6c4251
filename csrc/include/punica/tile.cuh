// Building blocks of the kernels: vectors of eight elements, tensor-core tiles, the work list.
#pragma once

#include "punica/primitives.cuh"

namespace punica {

// Conversions between fp32 and pairs of 16-bit elements in a word.
template <typename T>
struct Convert;

template <>
struct Convert<__nv_bfloat16> {
  static __device__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
  static __device__ float low(uint32_t word) { return __uint_as_float(word << 16); }
  static __device__ float high(uint32_t word) { return __uint_as_float(word & 0xffff0000u); }
  static __device__ uint32_t pack(float low, float high) {
    __nv_bfloat162 const pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<uint32_t const&>(pair);
  }
};

template <>
struct Convert<__half> {
  static __device__ float to_float(__half value) { return __half2float(value); }
  static __device__ float low(uint32_t word) { return __half2float(__ushort_as_half(word & 0xffffu)); }
  static __device__ float high(uint32_t word) { return __half2float(__ushort_as_half(word >> 16)); }
  static __device__ uint32_t pack(float low, float high) {
    __half2 const pair = __floats2half2_rn(low, high);
    return reinterpret_cast<uint32_t const&>(pair);
  }
};

// Eight 16-bit elements, kept as words: single elements would make the compiler take registers apart, and a register that is
// taken apart waits for its load.
struct Vec8 {
  uint32_t word[4];
};

__device__ inline Vec8 zero8() { return {{0, 0, 0, 0}}; }

__device__ inline Vec8 from_raw(uint4 raw) { return {{raw.x, raw.y, raw.z, raw.w}}; }

__device__ inline uint4 to_raw(Vec8 const& vec) { return make_uint4(vec.word[0], vec.word[1], vec.word[2], vec.word[3]); }

template <typename T>
__device__ inline float get(Vec8 const& vec, int index) {
  return index % 2 ? Convert<T>::high(vec.word[index / 2]) : Convert<T>::low(vec.word[index / 2]);
}

// Up to eight elements from `pointer`, of which `valid` exist (may be <= 0); the others are zero.
template <Source kSource, bool kAligned, typename T>
__device__ inline Vec8 load8(T const* pointer, int valid) {
  Vec8 out = zero8();
  if constexpr (kAligned) {
    if (valid > 0) out = from_raw(load16<kSource>(pointer));
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < valid) out.word[i / 2] |= static_cast<uint32_t>(load2<kSource>(pointer + i)) << (i % 2 * 16);
  }
  return out;
}

// Zeroes the elements from `valid` on.
__device__ inline void keep_first(Vec8& vec, int valid) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (2 * i >= valid) vec.word[i] = 0;
    if (2 * i + 1 == valid) vec.word[i] &= 0xffffu;
  }
}

// d += top/bottom [16 x 32] * column [32 x 8], all three loaded as eight consecutive k elements a lane: lane q of a quad
// holds k = 8q .. 8q+7. The sum over k may be taken in any order, so this needs no shuffle into the native order.
template <typename T>
__device__ inline void mma_16x8x32(float (&d)[4], Vec8 const& top, Vec8 const& bottom, Vec8 const& column) {
  mma_16x8x16<T>(d, top.word[0], bottom.word[0], top.word[1], bottom.word[1], column.word[0], column.word[1]);
  mma_16x8x16<T>(d, top.word[2], bottom.word[2], top.word[3], bottom.word[3], column.word[2], column.word[3]);
}

__device__ inline float4 added(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// The first `valid` of four sums, zeros for the rest.
__device__ inline float4 first_ranks(float4 sum, int valid) {
  return make_float4(valid > 0 ? sum.x : 0.f, valid > 1 ? sum.y : 0.f, valid > 2 ? sum.z : 0.f, valid > 3 ? sum.w : 0.f);
}

// Words kNumShrinkUnits .. kRankPitch of a plan.
struct WorkList {
  int num_units;
  int units_offset;
  int num_shares;
  int shares_offset;
  int least_shares;
  int rank_pitch;
};

__device__ inline WorkList load_work_list(int32_t const* plan) {
  int4 const words = load_metadata(reinterpret_cast<int4 const*>(plan + kNumShrinkUnits));
  int4 const more = load_metadata(reinterpret_cast<int4 const*>(plan + kLeastShares));
  return {words.x, words.y, words.z, words.w, more.x, more.y};
}

// For what shrinks or expands: the step of the plan must fit the scratch.
__device__ inline WorkList load_work_list(Tables const& tables, Scratch const& scratch) {
  int const num_rows = load_metadata(reinterpret_cast<int4 const*>(tables.plan)).y;
  WorkList const work = load_work_list(tables.plan);
  demand(num_rows <= scratch.num_rows && work.rank_pitch <= scratch.max_rank);
  return work;
}

__device__ inline TableRecord load_record(Tables const& tables, int slice, int slot) {
  auto const* words = reinterpret_cast<int4 const*>(tables.table + static_cast<int64_t>(slice) * tables.slice_stride + static_cast<int64_t>(slot) * tables.slot_stride);
  TableRecord record;
  auto* out = reinterpret_cast<int4*>(&record);
#pragma unroll
  for (int i = 0; i < 3; ++i) out[i] = load_metadata(words + i);
  return record;
}

__device__ inline int4 load_item(int32_t const* plan, int offset, int index) {
  return load_metadata(reinterpret_cast<int4 const*>(plan + offset) + index);
}

constexpr int kMaxSplits = 16;
constexpr int kMinSplitColumns = 512;  // one step of each warp of a shrink block

// How many splits of the in_features axis shrink sums apart. If expand adds them, both call this, so it may depend only on what both
// know. Every lane of a warp must call it: lane s - 1 rates s splits by the number of waves and the length of each, with
// what an item costs beside its columns expressed in columns, and the cheapest wins, the fewest splits first.
__device__ inline int split_count(Scratch const& scratch, int num_units, int slices, int in_features) {
  constexpr int kItemOverhead = 256;
  constexpr int kSumOverhead = 2048;  // of the block that is the last of a unit
  constexpr int kCostBits = 26;
  int const splits = static_cast<int>(threadIdx.x % 32) + 1;
  int const longest = num_units * slices <= kNumUnitCounters ? max(1, in_features / kMinSplitColumns) : 1;
  unsigned rated = ~0u;
  if (splits <= min(min(kMaxSplits, longest), max(1, scratch.max_splits))) {
    int const waves = quotient(num_units * slices * splits + scratch.num_blocks - 1, scratch.num_blocks);
    unsigned const cost = static_cast<unsigned>(waves) * (quotient(in_features, splits) + kItemOverhead) + (scratch.summed && splits > 1 ? kSumOverhead : 0);
    rated = min(cost, (1u << kCostBits) - 1) << 5 | splits;
  }
  return warp_min(rated) & 31;
}

__device__ inline int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace punica
