// One token of each row of logits: the largest logit, or a draw at the row's temperature, top_k, top_p and min_p.
//
// A cluster of up to eight blocks takes a row. Each block reads its part once and keeps the keys (sample_row.cuh) in shared
// memory; what blocks tell each other is a few words, or a histogram. The draw is an inverse-CDF look-up in exact integers:
// the result is a function of the row alone.
#pragma once

#include "punica/sample_cut.cuh"

namespace punica {

constexpr int kMinBlockTokens = 4096;  // fewer are not worth another block

struct SampleShared {
  LargestShared largest;
  CutShared cut;
  uint64_t chunk_sums[kSampleWarps];
  uint64_t segment_sums[kSampleWarps];
  uint64_t tie_counts[kMaxClusterBlocks];
  uint64_t totals[kMaxClusterBlocks];
  int tie_end;
  int found;
};

// Each warp takes a chunk of consecutive tokens; a whole number of warps wide.
__device__ inline int chunk_width(int width) { return round_up((width + kSampleWarps - 1) / kSampleWarps, 32); }

// The sum of value_of(i) over the block's tokens; leaves those of the chunks in shared.chunk_sums.
template <typename F>
__device__ inline uint64_t sum_chunks(F const& value_of, int width, SampleShared& shared) {
  int const warp = threadIdx.x / 32;
  int const chunk = chunk_width(width);
  int const end = min((warp + 1) * chunk, width);
  uint64_t sum = 0;
#pragma unroll 4
  for (int i = warp * chunk + threadIdx.x % 32; i < end; i += 32) sum += value_of(i);
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) shared.chunk_sums[warp] = sum;
  __syncthreads();
  uint64_t total = 0;
  for (int other = 0; other < kSampleWarps; ++other) total += shared.chunk_sums[other];
  return total;
}

// The token at which the running sum of value_of first exceeds `target`, which is below the block's sum; after sum_chunks.
template <typename F>
__device__ inline int find_token(F const& value_of, uint64_t target, int width, SampleShared& shared) {
  int const chunk = chunk_width(width);
  int owner = 0;
  while (target >= shared.chunk_sums[owner]) target -= shared.chunk_sums[owner++];
  int const each = (chunk + kSampleThreads - 1) / kSampleThreads;
  int const begin = owner * chunk + threadIdx.x * each;
  int const end = min(min(begin + each, (owner + 1) * chunk), width);
  uint64_t sum = 0;
  for (int i = begin; i < end; ++i) sum += value_of(i);
  uint64_t through = sum_before(sum, shared.segment_sums);
  if (target >= through && target < through + sum) {
    int i = begin;
    while (target >= through + value_of(i)) through += value_of(i++);
    shared.found = i;
  }
  __syncthreads();
  return shared.found;
}

// Id below which tokens of the cut's key are kept.
template <typename Part>
__device__ inline int tie_end(Part const& part, Cluster const& cluster, Cut const& cut, SampleShared& shared) {
  auto const is_tied = [&](int i) -> uint64_t { return part.key(i) == cut.key; };
  uint64_t const own = sum_chunks(is_tied, part.width, shared);
  share(cluster, shared.tie_counts, own);
  uint64_t target = cut.tied_kept - 1;
  for (int block = 0; block < cluster.rank; ++block) target -= shared.tie_counts[block];  // wraps around if it lies before
  if (target < own) {
    int const end = part.first_id + find_token(is_tied, target, part.width, shared) + 1;
    int const block = threadIdx.x;
    if (block < cluster.size) *cluster.in_block(&shared.tie_end, block) = end;
  }
  sync(cluster);
  return shared.tie_end;
}

// The cut of top_k, and then of top_p among what top_k leaves: a shorter list of the same ranking.
template <typename Part>
__device__ inline Cut cut_row(Part const& part, Cluster const& cluster, SampleRow const& row, bool has_top_k,
                              SampleShared& shared) {
  Histograms& histograms = shared.cut.histograms;
  sync(cluster);  // histograms.lead is complete
  Cut cut;
  if (has_top_k) {
    cut = find_cut(part, cluster, histograms.descent[0], true, row.top_k, shared.cut);
  } else {
    auto const in_lead = [&](int bin) { return lead_tally(cluster, histograms, bin); };
    cut = {0, 0, false, find_bin<kLeadBins>(in_lead, {0, 0}, false, ~0ull, shared.cut).heavier.sum};
  }
  if (row.top_p < 1.) {
    uint64_t const reach = static_cast<uint64_t>(ceil(row.top_p * static_cast<double>(cut.mass)));
    uint64_t const bound = max(static_cast<uint64_t>(1), min(reach, cut.mass));
    cut = find_cut(part, cluster, histograms.descent[1], false, bound, shared.cut);
  }
  return cut;
}

template <typename T, bool kCached>
__device__ inline void draw_token(RowPart<T, kCached> const& part, Cluster const& cluster, SampleRow const& row,
                                  int vocab_size, int64_t* token_id, SampleShared& shared) {
  bool const has_top_k = row.top_k > 0 && row.top_k < vocab_size;
  Cut cut{0, 0, false, 0};
  int end = 0;
  if (has_top_k || row.top_p < 1.) {
    auto* const words = reinterpret_cast<uint32_t*>(&shared.cut.histograms);
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(Histograms) / 4); i += kSampleThreads) words[i] = 0;
    __syncthreads();
    part.make_keys([&](uint32_t key) {
      uint32_t const parts[3] = {1, key & kLowMask, key >> kLowBits & kLowMask};
      add_to_bin(shared.cut.histograms.lead, key ? static_cast<int>(key >> 2 * kLowBits) : -1, parts);
    });
    cut = cut_row(part, cluster, row, has_top_k, shared);
    if (cut.splits_ties) {
      end = tie_end(part, cluster, cut, shared);
    } else if (cut.tied_kept) {
      end = vocab_size;
    }
  } else {
    if constexpr (kCached) part.make_keys([](uint32_t) {});
    __syncthreads();
  }

  auto const weight = [&](int i) -> uint64_t {
    uint32_t const key = part.key(i);
    if (key < cut.key || (key == cut.key && part.first_id + i >= end)) return 0;
    uint64_t const weight = weight_of(key);
    return weight < static_cast<uint64_t>(row.least) ? 0 : weight;
  };
  uint64_t const own = sum_chunks(weight, part.width, shared);
  share(cluster, shared.totals, own);
  uint64_t total = 0;
  uint64_t before = 0;
  for (int block = 0; block < cluster.size; ++block) {
    if (block < cluster.rank) before += shared.totals[block];
    total += shared.totals[block];
  }
  if (total == 0) {
    if (cluster.rank == 0 && threadIdx.x == 0) *token_id = 0;
    return;
  }
  uint64_t const target = min(static_cast<uint64_t>(row.point * static_cast<double>(total)), total - 1);
  if (target < before || target - before >= own) return;
  int const found = find_token(weight, target - before, part.width, shared);
  if (threadIdx.x == 0) *token_id = part.first_id + found;
}

template <typename T, bool kCached>
__global__ void __launch_bounds__(kSampleThreads, 2) sample_kernel(const __grid_constant__ SampleParams params) {
  auto& shared = block_shared<SampleShared>();
  Cluster const cluster;
  cluster.arrive();
  uint32_t* const cache = block_cache();
  int const index = blockIdx.x / cluster.size;
  int const width = block_width(params.vocab_size, cluster.size);
  int const first_id = cluster.rank * width;
  T const* const logits = static_cast<T const*>(params.logits) + index * params.logits_stride + first_id;
  RowPart<T, kCached> part{logits, cache, first_id, min(width, params.vocab_size - first_id), 0.f, 0.f};
  Largest const mine = scan_logits<T, kCached>(logits, first_id, part.width, reinterpret_cast<float*>(cache));
  Largest const largest = row_largest(mine, cluster, shared.largest);
  SampleRow const row = params.rows[index];
  bool const writes = cluster.rank == 0 && threadIdx.x == 0;
  if (writes) params.finite[index] = largest.finite;
  if (row.temperature == 0.f) {
    if (writes) params.token_ids[index] = largest.token();
    return;
  }
  part.largest = fmaxf(largest.logit, -FLT_MAX);
  part.temperature = row.temperature;
  draw_token(part, cluster, row, params.vocab_size, params.token_ids + index, shared);
}

template <typename T>
__global__ void __launch_bounds__(kSampleThreads) greedy_kernel(const __grid_constant__ SampleParams params) {
  auto& shared = block_shared<LargestShared>();
  Cluster const cluster;
  cluster.arrive();
  int const index = blockIdx.x / cluster.size;
  int const width = block_width(params.vocab_size, cluster.size);
  int const first_id = cluster.rank * width;
  T const* const logits = static_cast<T const*>(params.logits) + index * params.logits_stride + first_id;
  Largest const mine = scan_logits<T, false>(logits, first_id, min(width, params.vocab_size - first_id), nullptr);
  Largest const largest = row_largest(mine, cluster, shared);
  if (cluster.rank == 0 && threadIdx.x == 0) {
    params.finite[index] = largest.finite;
    params.token_ids[index] = largest.token();
  }
}

inline int cluster_blocks(int vocab_size) {
  int blocks = 1;
  while (blocks < kMaxClusterBlocks && blocks * kMinBlockTokens < vocab_size) blocks *= 2;
  return blocks;
}

template <typename T>
cudaError_t launch_sample(SampleParams const& params, LaunchConfig const& config) {
  if (params.num_rows == 0) return cudaSuccess;
  int device = 0;
  int shared_limit = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  int const blocks = config.dependent_launch ? cluster_blocks(params.vocab_size) : 1;  // clusters, too, are from sm_90 on
  int const cache_bytes = block_width(params.vocab_size, blocks) * static_cast<int>(sizeof(float));
  bool const cached = cache_bytes + static_cast<int>(sizeof(SampleShared)) <= shared_limit;
  auto* kernel = greedy_kernel<T>;
  cudaLaunchConfig_t launch_config{};
  if (params.rows != nullptr) {
    kernel = cached ? sample_kernel<T, true> : sample_kernel<T, false>;
    launch_config.dynamicSmemBytes = cached ? cache_bytes : 0;
    if (cached) {
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, cache_bytes);
      if (error != cudaSuccess) return error;
    }
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = blocks;
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  launch_config.gridDim = dim3(params.num_rows * blocks);
  launch_config.blockDim = dim3(kSampleThreads);
  launch_config.stream = config.stream;
  launch_config.attrs = &attribute;
  launch_config.numAttrs = blocks > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&launch_config, kernel, params);
}

}  // namespace punica
