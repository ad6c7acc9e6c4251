// Where top_k and top_p cut a row: a radix descent over the keys in three steps of 9, 10 and 10 bits, each a histogram in
// shared memory, without sorting.
//
// Tokens are ranked by weight, then by id. Both filters keep a list of first tokens: the shortest whose number, or whose
// weights, reach a bound. Every block reads the histograms of the whole cluster and so comes to the same result.
#pragma once

#include "punica/sample_row.cuh"

namespace punica {

constexpr int kLeadBins = 512;  // by the leading 9 bits of a key: 8 to an octave
constexpr int kLowBits = 10;
constexpr int kLowBins = 1 << kLowBits;
constexpr uint32_t kLowMask = kLowBins - 1;

// How many tokens, and the sum of their weights.
struct Tally {
  uint64_t count;
  uint64_t sum;
};

// The list ends inside one bin, or never.
struct Bin {
  int index;  // -1: all tokens together do not reach the bound
  Tally heavier;
  Tally own;
};

// Sums of parts of the keys, so that 32-bit atomics do: at most 2^22 tokens of 10 bits each.
struct Descent {
  uint32_t middle[2][kLowBins];  // number; low 10 bits
  uint32_t last[1][kLowBins];    // number
};

struct Histograms {
  uint32_t lead[3][kLeadBins];  // number; low 10 bits; the 10 bits above these
  Descent descent[2];           // of top_k; of top_p
};

struct CutShared {
  Histograms histograms;
  uint64_t count_sums[kSampleWarps];
  uint64_t weight_sums[kSampleWarps];
  Bin bin;
};

// Keeps the tokens of a larger key, and of those of that key the first `tied_kept` in order of id.
struct Cut {
  uint32_t key;
  uint64_t tied_kept;
  bool splits_ties;  // not all tokens of that key are kept
  uint64_t mass;     // sum of the weights kept
};

// Adds a lane's parts to its bin (-1: none); all lanes of a warp call it. Equal keys would otherwise queue at one address.
template <int kParts, int kBins>
__device__ inline void add_to_bin(uint32_t (&bins)[kParts][kBins], int bin, uint32_t const (&parts)[kParts]) {
  int same;
  __match_all_sync(kAllLanes, bin, &same);
  if (same && bin < 0) return;
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    if (same) {
      uint32_t const sum = __reduce_add_sync(kAllLanes, parts[p]);
      if (threadIdx.x % 32 == 0) atomicAdd(&bins[p][bin], sum);
    } else if (bin >= 0) {
      atomicAdd(&bins[p][bin], parts[p]);
    }
  }
}

// The sum of `count` weights whose keys begin with those of `prefix` and whose remaining low bits add up to `rest`.
__device__ inline uint64_t weights_of(uint32_t prefix, uint64_t count, uint64_t rest) {
  int const exponent = static_cast<int>(prefix >> kMantissaBits) - 1;  // of 2, of each weight
  uint32_t const leading = 1u << kMantissaBits | (prefix & ((1u << kMantissaBits) - 1));
  uint64_t const mantissas = count * leading + rest;
  // Weights below 2^23 are integers too: what is shifted out is 0.
  return exponent >= kMantissaBits ? mantissas << (exponent - kMantissaBits) : mantissas >> (kMantissaBits - exponent);
}

template <int kBins>
__device__ inline uint64_t cluster_sum(Cluster const& cluster, uint32_t (&bins)[kBins], int bin) {
  uint64_t sum = 0;
#pragma unroll
  for (int block = 0; block < kMaxClusterBlocks; ++block)
    if (block < cluster.size) sum += *cluster.in_block(&bins[bin], block);
  return sum;
}

// The bin, from the heaviest down, in which tokens or weights reach `reach`. tally_of(bin): of the cluster.
template <int kBins, typename F>
__device__ inline Bin find_bin(F const& tally_of, Tally heavier, bool by_count, uint64_t reach, CutShared& shared) {
  constexpr int kEach = kBins / kSampleThreads;
  int const first = kBins - 1 - static_cast<int>(threadIdx.x) * kEach;
  Tally own[kEach];
  Tally of_thread{0, 0};
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    own[j] = tally_of(first - j);
    of_thread.count += own[j].count;
    of_thread.sum += own[j].sum;
  }
  Tally before{heavier.count + sum_before(of_thread.count, shared.count_sums),
               heavier.sum + sum_before(of_thread.sum, shared.weight_sums)};
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    Tally const through{before.count + own[j].count, before.sum + own[j].sum};
    bool const short_of = (by_count ? before.count : before.sum) < reach;
    if (short_of && (by_count ? through.count : through.sum) >= reach) shared.bin = {first - j, before, own[j]};
    before = through;
  }
  if (threadIdx.x == kSampleThreads - 1 && (by_count ? before.count : before.sum) < reach)
    shared.bin = {-1, before, {0, 0}};
  __syncthreads();
  Bin const found = shared.bin;
  __syncthreads();
  return found;
}

// Whether the list holds all tokens of the bin: then there is nothing to look for inside.
__device__ inline bool is_whole(Bin const& bin, bool by_count, uint64_t reach) {
  return bin.own.count == 1 || (by_count && bin.heavier.count + bin.own.count == reach);
}

__device__ inline Cut cut_below(uint32_t key, Bin const& bin) {
  return {key - 1, 0, false, bin.heavier.sum + bin.own.sum};
}

__device__ inline Tally lead_tally(Cluster const& cluster, Histograms& histograms, int bin) {
  uint64_t const count = cluster_sum(cluster, histograms.lead[0], bin);
  uint64_t const rest =
      cluster_sum(cluster, histograms.lead[1], bin) + (cluster_sum(cluster, histograms.lead[2], bin) << kLowBits);
  return {count, count == 0 ? 0 : weights_of(static_cast<uint32_t>(bin) << 2 * kLowBits, count, rest)};
}

// The cut after the shortest list of first tokens whose number or weights reach `reach` (>= 1). histograms.lead is complete.
template <typename Part>
__device__ inline Cut find_cut(Part const& part, Cluster const& cluster, Descent& descent, bool by_count, uint64_t reach,
                               CutShared& shared) {
  auto const in_lead = [&](int bin) { return lead_tally(cluster, shared.histograms, bin); };
  Bin bin = find_bin<kLeadBins>(in_lead, {0, 0}, by_count, reach, shared);
  if (bin.index < 0) return {0, 0, false, bin.heavier.sum};
  uint32_t prefix = bin.index;
  if (is_whole(bin, by_count, reach)) return cut_below(prefix << 2 * kLowBits, bin);

  part.for_each_key([&](uint32_t key) {
    uint32_t const parts[2] = {1, key & kLowMask};
    add_to_bin(descent.middle, key >> 2 * kLowBits == prefix ? static_cast<int>(key >> kLowBits & kLowMask) : -1, parts);
  });
  sync(cluster);
  auto const in_middle = [&](int index) -> Tally {
    uint64_t const count = cluster_sum(cluster, descent.middle[0], index);
    uint64_t const rest = cluster_sum(cluster, descent.middle[1], index);
    return {count, weights_of((prefix << kLowBits | index) << kLowBits, count, rest)};
  };
  bin = find_bin<kLowBins>(in_middle, bin.heavier, by_count, reach, shared);
  prefix = prefix << kLowBits | bin.index;
  if (is_whole(bin, by_count, reach)) return cut_below(prefix << kLowBits, bin);

  part.for_each_key([&](uint32_t key) {
    uint32_t const parts[1] = {1};
    add_to_bin(descent.last, key >> kLowBits == prefix ? static_cast<int>(key & kLowMask) : -1, parts);
  });
  sync(cluster);
  auto const in_last = [&](int index) -> Tally {
    uint64_t const count = cluster_sum(cluster, descent.last[0], index);
    return {count, weights_of(prefix << kLowBits | index, count, 0)};
  };
  bin = find_bin<kLowBins>(in_last, bin.heavier, by_count, reach, shared);
  uint32_t const key = prefix << kLowBits | bin.index;
  uint64_t const weight = weight_of(key);
  uint64_t const kept = by_count ? reach - bin.heavier.count : (reach - bin.heavier.sum + weight - 1) / weight;
  return {key, kept, kept < bin.own.count, bin.heavier.sum + kept * weight};
}

}  // namespace punica
