// A block's part of a row of logits: the largest of them, and weights as exact integers.
//
// A weight is exp((logit - largest) / temperature) in units of 2^-40, cut to an integer; it is then a float32 number without
// fraction, so its bits order as it does, and a token's `key` is these bits from an exponent below 1 on: 0 for weight 0, else
// 29 bits. Sums of weights are 64-bit integers: they do not depend on the order of addition.
#pragma once

#include <cfloat>

#include "punica/block_sums.cuh"
#include "punica/sample_params.h"
#include "punica/tile.cuh"

namespace punica {

constexpr int kSampleWarps = kSampleThreads / 32;
constexpr float kWeightUnit = 0x1p40f;
constexpr int kMantissaBits = 23;
constexpr uint32_t kKeyBias = 126u << kMantissaBits;
constexpr int kKeyBits = 29;

// Tokens of a row that a block takes, from block times that many on; a multiple of what one load brings.
__host__ __device__ inline int block_width(int vocab_size, int num_blocks) {
  return ((vocab_size + num_blocks - 1) / num_blocks + 7) / 8 * 8;
}

// Logits of a 16-byte load, in fp32.
template <typename T>
struct Logits {
  static constexpr int kPerLoad = 8;
  static __device__ float one(T value) { return Convert<T>::to_float(value); }
  static __device__ float get(uint4 const& raw, int index) {
    uint32_t const word = index < 4 ? (index < 2 ? raw.x : raw.y) : (index < 6 ? raw.z : raw.w);
    return index % 2 ? Convert<T>::high(word) : Convert<T>::low(word);
  }
};

template <>
struct Logits<float> {
  static constexpr int kPerLoad = 4;
  static __device__ float one(float value) { return value; }
  static __device__ float get(uint4 const& raw, int index) {
    return __uint_as_float(index < 2 ? (index == 0 ? raw.x : raw.y) : (index == 2 ? raw.z : raw.w));
  }
};

// A logit and its token. Packed, the larger logit is the larger number, and of equal ones that with the lower id.
struct Largest {
  float logit = -INFINITY;
  uint32_t id = ~0u;  // none above -inf
  bool finite = true;

  __device__ void add(float value, int token) {
    finite = finite && value < INFINITY;  // NaN is not below anything
    if (value > logit) {
      logit = value;
      id = token;
    }
  }

  __device__ uint64_t packed() const {
    uint32_t const bits = __float_as_uint(logit + 0.f);  // -0 and 0 are equal
    uint32_t const ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
    return static_cast<uint64_t>(ordered) << 32 | ~id;
  }

  static __device__ Largest unpacked(uint64_t packed) {
    uint32_t const ordered = static_cast<uint32_t>(packed >> 32);
    Largest out;
    out.logit = __uint_as_float(ordered >> 31 ? ordered & 0x7fffffffu : ~ordered);
    out.id = ~static_cast<uint32_t>(packed);
    return out;
  }

  // A row of -inf alone takes id 0.
  __device__ int64_t token() const { return id == ~0u ? 0 : id; }
};

// The largest logit of a thread's share of `width` logits, the first of which is that of token first_id. Copies all of them
// to `cache` if there is one.
template <typename T, bool kCached>
__device__ inline Largest scan_logits(T const* logits, int first_id, int width, float* cache) {
  using Load = Logits<T>;
  Largest found;
  int const loads = reinterpret_cast<uintptr_t>(logits) % 16 == 0 ? width / Load::kPerLoad : 0;
  auto const* raw = reinterpret_cast<uint4 const*>(logits);
#pragma unroll 4
  for (int load = threadIdx.x; load < loads; load += kSampleThreads) {
    uint4 const values = raw[load];
#pragma unroll
    for (int j = 0; j < Load::kPerLoad; ++j) {
      float const value = Load::get(values, j);
      found.add(value, first_id + load * Load::kPerLoad + j);
      if constexpr (kCached) cache[load * Load::kPerLoad + j] = value;
    }
  }
#pragma unroll 4
  for (int i = loads * Load::kPerLoad + threadIdx.x; i < width; i += kSampleThreads) {
    float const value = Load::one(logits[i]);
    found.add(value, first_id + i);
    if constexpr (kCached) cache[i] = value;
  }
  return found;
}

struct LargestPart {
  uint64_t packed;
  int finite;
};

struct LargestShared {
  uint64_t warps[kSampleWarps];
  LargestPart parts[kMaxClusterBlocks];
};

// The largest logit of the row, out of what each thread of its blocks found. The cluster has arrived once before.
__device__ inline Largest row_largest(Largest const& mine, Cluster const& cluster, LargestShared& shared) {
  uint64_t const of_warp = warp_max(mine.packed());
  if (threadIdx.x % 32 == 0) shared.warps[threadIdx.x / 32] = of_warp;
  LargestPart part{0, __syncthreads_and(mine.finite)};
  if (threadIdx.x < 32) part.packed = warp_max(threadIdx.x < kSampleWarps ? shared.warps[threadIdx.x] : 0);
  cluster.wait();
  share(cluster, shared.parts, part);
  uint64_t packed = 0;
  bool finite = true;
  for (int block = 0; block < cluster.size; ++block) {
    packed = max(packed, shared.parts[block].packed);
    finite = finite && shared.parts[block].finite;
  }
  Largest out = Largest::unpacked(packed);
  out.finite = finite;
  return out;
}

__device__ inline uint32_t weight_key(float logit, float largest, float temperature) {
  float const weight = expf(__fdiv_rn(logit - largest, temperature)) * kWeightUnit;
  return weight >= 1.f ? __float_as_uint(truncf(fminf(weight, kWeightUnit))) - kKeyBias : 0;
}

__device__ inline uint64_t weight_of(uint32_t key) {
  return key == 0 ? 0 : static_cast<uint64_t>(__uint_as_float(key + kKeyBias));
}

// The keys of a block's part of a row: kept in shared memory, or computed again each time where they don't fit.
template <typename T, bool kCached>
struct RowPart {
  T const* logits;
  uint32_t* cache;
  int first_id;
  int width;
  float largest;
  float temperature;

  // 0, that of no weight, beyond the end.
  __device__ uint32_t key(int i) const {
    if (i >= width) return 0;
    if constexpr (kCached) return cache[i];
    return weight_key(Logits<T>::one(logits[i]), largest, temperature);
  }

  // Turns the cached logits into keys, in place, and calls f(key) for each; whole warps call it together.
  template <typename F>
  __device__ void make_keys(F const& f) const {
#pragma unroll 2
    for (int base = 0; base < width; base += kSampleThreads) {
      int const i = base + threadIdx.x;
      uint32_t made = 0;
      if constexpr (kCached) {
        if (i < width) made = cache[i] = weight_key(__uint_as_float(cache[i]), largest, temperature);
      } else {
        made = key(i);
      }
      f(made);
    }
  }

  template <typename F>
  __device__ void for_each_key(F const& f) const {
#pragma unroll 4
    for (int base = 0; base < width; base += kSampleThreads) f(key(base + threadIdx.x));
  }
};

}  // namespace punica
