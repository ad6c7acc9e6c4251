// y = x W^T + bias + scale * (x A^T) B^T: a linear layer of at most 128 rows and all that adapters add to it in one kernel, for sm_90a.
//
// A block streams `height` rows of W, its part of K, through a ring of stages in shared memory, and with each stage the step's x: W is the warpgroup
// product's row operand, so that a step's few rows are its N. Meanwhile some warps compute low-rank rows of the step (linear_shrink.cuh). Behind W, B
// comes through the same ring: what one adapter has of the block's columns lies together in memory, so adapters cost their bytes and no launch. They
// are added to the sums in registers. The blocks of a cluster share K, and the adapted rows; their sums meet in shared memory, each block ending up with
// its share of the columns.
#pragma once

#include "punica/linear_adapters.cuh"
#include "punica/linear_params.h"
#include "punica/linear_shrink.cuh"
#include "punica/wgmma.cuh"

namespace punica {

constexpr int kSumsBarrier = 1;

// Who does what in a block: kGroups warpgroups consume, each with kParts products of 64 columns. Behind them a warp that brings W and x, one that brings
// adapters, and those that shrink.
template <int kRows_, int kGroups_, int kParts_>
struct LinearShape {
  static constexpr int kRows = kRows_;
  static constexpr int kGroups = kGroups_;
  static constexpr int kParts = kParts_;
  static constexpr int kConsumers = 128 * kGroups;
  static constexpr int kSums = kRows * kLinearTileRows * kGroups * kParts;  // 32 bits each, as registers
  static constexpr int kShrinkers = kSums < 1 << 14 ? 4 : 2;                // more have no registers
  static constexpr int kThreads = kConsumers + 64 + 32 * kShrinkers;
  // Half of all registers are sums: consumers take some from the others, which are a warpgroup then.
  static constexpr bool kTakesRegisters = kSums == 1 << 15;
  static constexpr int kConsumerRegisters = 200;
  static constexpr int kOtherRegisters = 104;
};

#ifdef PUNICA_HOPPER

// What a block has in shared memory beside its ring.
template <typename Team>
struct LinearShared {
  LinearStages stages;
  ShrinkShared<Team> shrink;
};

// Sums of the warpgroup's columns over the block's part of K.
template <typename T, int kRows, int kParts>
__device__ inline void multiply_steps(LinearParams const& params, LinearRing& ring, int num_steps, int first_column, float (&d)[kParts][kRows / 2]) {
  // A stage is given back when its products are done, though the tensor cores then wait for the next: with many rows they take long, and the ring is short.
  constexpr bool kAtOnce = kRows > 64;
  LinearTile const& tile = params.tile;
  int const weight_box = tile.height * 2 * kLinearBox;
#pragma unroll 1
  for (int step = 0; step < num_steps; ++step) {
    uint32_t const stage = ring.await_full();
    begin_products();
#pragma unroll 1
    for (int box = 0; box < tile.boxes; ++box) {
      uint64_t const w = operand_at(stage + box * weight_box + first_column * 2 * kLinearBox);
      uint64_t const x = operand_at(stage + tile.boxes * weight_box + box * kRows * 2 * kLinearBox);
#pragma unroll
      for (int k = 0; k < kLinearBox / 16; ++k)
#pragma unroll
        for (int part = 0; part < kParts; ++part) multiply_warpgroup<T>(d[part], w + part * (kLinearTileRows * 2 * kLinearBox / 16) + 2 * k, x + 2 * k);
    }
    commit_products();
    if constexpr (kAtOnce) {
      await_products<0>();
      ring.release();
    } else if (step > 0) {
      await_products<1>();
      ring.release_last();
    }
    ring.advance();
  }
  await_products<0>();
  if (!kAtOnce && num_steps > 0) ring.release_last();
}

// Brings W and x, and lets adapters follow. By one thread.
template <int kRows>
__device__ inline void fill_ring(LinearParams const& params, LinearRing& ring, int first_step, int num_steps, int first_column) {
  LinearTile const& tile = params.tile;
  wait_for_previous();
  start_next();
#pragma unroll 1
  for (int step = first_step; step < first_step + num_steps; ++step) {
    uint32_t to = ring.await_empty();
    uint32_t const full = ring.full();
    arrive_for(full, params.copied_bytes());
    int const column = step * tile.boxes * kLinearBox;
    for (int box = 0; box < tile.boxes; ++box, to += tile.height * 2 * kLinearBox)
      copy_box(to, params.weight, column + box * kLinearBox, first_column, full, Keep::kFirst);
    for (int box = 0; box < tile.boxes; ++box, to += kRows * 2 * kLinearBox) copy_box(to, params.x, column + box * kLinearBox, 0, full, Keep::kLast);
    ring.advance();
  }
  ring.begin_adapters();
}

// Each thread of the cluster arrives, and then waits for all; what they wrote before is seen.
__device__ inline void arrive_in_cluster(Cluster const& cluster, int blocks) {
  if (blocks > 1) cluster.arrive();
}
__device__ inline void await_cluster(Cluster const& cluster, int blocks) {
  if (blocks > 1) cluster.wait();
}

// Sums of sixteen columns of the tile go to the block whose columns they are.
template <int kRows>
__device__ inline void give_sums(LinearParams const& params, uint32_t sums, int split, int group, float const (&d)[kRows / 2]) {
  int const columns = params.tile.height / params.tile.splits;
  int const pitch = params.exchange_pitch();
  int const lane = threadIdx.x % 32;
  int const owner = group / columns;
  uint32_t to = sums + ((split * kRows + lane % 4 * 2) * pitch + group - owner * columns + lane / 4) * 4;
  if (params.tile.splits > 1) to = address_in_block(to, owner);
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) store_in_cluster(to + ((8 * j + i % 2) * pitch + i / 2 * 8) * 4, d[4 * j + i]);
}

// The block's columns of the output: sums of all blocks of the cluster, and the layer's bias.
template <typename T, int kRows, int kThreads>
__device__ inline void store_columns(LinearParams const& params, uint32_t sums, int first_column, int columns) {
  int const pitch = params.exchange_pitch();
  int const vectors = min(columns, params.out_features - first_column) / 8;
  T const* const bias = static_cast<T const*>(params.bias);
#pragma unroll 2
  for (int index = threadIdx.x; index < vectors * params.num_rows; index += kThreads) {
    int const row = quotient(index, vectors);
    int const column = (index - row * vectors) * 8;
    float out[8] = {};
#pragma unroll 1
    for (int split = 0; split < params.tile.splits; ++split) {
      uint32_t const from = sums + ((split * kRows + row) * pitch + column) * 4;
      uint4 const low = load_shared16(from), high = load_shared16(from + 16);
      uint32_t const terms[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) out[i] += __uint_as_float(terms[i]);
    }
    if (bias != nullptr) {
      Vec8 const own = from_raw(load16<Source::kConstant>(bias + first_column + column));
#pragma unroll
      for (int i = 0; i < 8; ++i) out[i] += get<T>(own, i);
    }
    uint4 const packed = make_uint4(Convert<T>::pack(out[0], out[1]), Convert<T>::pack(out[2], out[3]), Convert<T>::pack(out[4], out[5]),
                                    Convert<T>::pack(out[6], out[7]));
    *reinterpret_cast<uint4*>(static_cast<T*>(params.y) + row * params.y_stride + first_column + column) = packed;
  }
}

template <typename T, typename Shape>
__device__ inline void linear_block(LinearParams const& params) {
  constexpr int kRows = Shape::kRows;
  constexpr int kParts = Shape::kParts;
  constexpr int kConsumers = Shape::kConsumers;
  using Team = TeamOfBlock<Shape::kShrinkers, Shape::kThreads>;
  auto& shared = block_shared<LinearShared<Team>>();
  Cluster const cluster;
  LinearTile const& tile = params.tile;
  uint32_t const memory = kept(round_up(shared_address(block_cache()), 1024));
  int const split = blockIdx.x % tile.splits;
  int const first_column = static_cast<int>(blockIdx.x) / tile.splits * tile.height;
  int const first_step = params.num_steps * split / tile.splits;
  int const num_steps = params.num_steps * (split + 1) / tile.splits - first_step;
  int const role = static_cast<int>(threadIdx.x) / 32 - kConsumers / 32;  // negative: consumer
  if (role == 0) {
    int const lane = threadIdx.x % 32;
    if (lane < params.stages) {
      init_barrier(shared_address(&shared.stages.full[lane]), 1);
      init_barrier(shared_address(&shared.stages.empty[lane]), kConsumers / 32);
    }
    if (lane == 0) init_barrier(shared_address(&shared.stages.asked), 1);
    if (lane == 0) fetch_map(params.weight);
    if (lane == 1) fetch_map(params.x);
    fence_barriers();
  }
  __syncthreads();
  bool const in_ring = params.meets_in_ring();
  if (!in_ring) arrive_in_cluster(cluster, tile.splits);  // nobody writes into a block that has not begun
  LinearRing ring(shared.stages, memory, params.stage_bytes(), params.stages);
  if (role >= 0) {
    if constexpr (Shape::kTakesRegisters) give_registers<Shape::kOtherRegisters>();
    if (role == 0) {
      if (threadIdx.x % 32 == 0) fill_ring<kRows>(params, ring, first_step, num_steps, first_column);
      __syncwarp();
    } else if (role == 1) {
      ring.skip(num_steps);
      stream_adapters<T>(params, ring, first_column, split);
    } else {
      shrink_from_queue<T>(params.shrink, shared.shrink);
    }
    if (in_ring) arrive_in_cluster(cluster, tile.splits);
    await_cluster(cluster, tile.splits);
    arrive_in_cluster(cluster, tile.splits);
    await_cluster(cluster, tile.splits);
    return;
  }
  if constexpr (Shape::kTakesRegisters) take_registers<Shape::kConsumerRegisters>();
  int const own = static_cast<int>(threadIdx.x) / 128 * kParts * kLinearTileRows;  // of the warpgroup's columns, in the tile
  int const group = own + static_cast<int>(threadIdx.x) % 128 / 32 * 16;
  float d[kParts][kRows / 2] = {};
  multiply_steps<T, kRows, kParts>(params, ring, num_steps, own, d);
  add_adapters<T, kRows, kParts>(ring, group, d);
  if (in_ring) arrive_in_cluster(cluster, tile.splits);  // nor into a ring that is still read
  await_cluster(cluster, tile.splits);
  if (tile.splits == 1) named_barrier(kSumsBarrier, kConsumers);  // the ring has been read
  uint32_t const sums = memory + (in_ring ? 0 : params.ring_bytes());
#pragma unroll
  for (int part = 0; part < kParts; ++part)
    if (group + part * kLinearTileRows < tile.height) give_sums<kRows>(params, sums, split, group + part * kLinearTileRows, d[part]);
  arrive_in_cluster(cluster, tile.splits);
  await_cluster(cluster, tile.splits);
  if (tile.splits == 1) named_barrier(kSumsBarrier, kConsumers);
  int const columns = tile.height / tile.splits;
  store_columns<T, kRows, kConsumers>(params, sums, first_column + split * columns, columns);
}

#endif

template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) linear_kernel(const __grid_constant__ LinearParams params) {
#ifdef PUNICA_HOPPER
  linear_block<T, Shape>(params);
#else
  __trap();  // compiled for 90 instead of 90a: there would be no result
#endif
}

template <typename T, typename Shape>
cudaError_t launch_linear_shape(LinearParams const& params, int shared_bytes, LaunchConfig const& config) {
  auto* const kernel = linear_kernel<T, Shape>;
  cudaError_t const allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kLinearSharedBytes);
  if (allowed != cudaSuccess) return allowed;
  return launch_clusters(kernel, params.shrink.scratch.num_blocks, Shape::kThreads, params.tile.splits, shared_bytes, params, config);
}

template <typename T, int kRows>
cudaError_t launch_linear_rows(LinearParams const& params, int shared_bytes, LaunchConfig const& config) {
  if (params.num_parts() == 1) return launch_linear_shape<T, LinearShape<kRows, 1, 1>>(params, shared_bytes, config);
  if (params.num_parts() == 2) return launch_linear_shape<T, LinearShape<kRows, 2, 1>>(params, shared_bytes, config);
  if constexpr (kRows == 64) {
    return launch_linear_shape<T, LinearShape<kRows, 4, 1>>(params, shared_bytes, config);  // two parts have no registers
  } else {
    return launch_linear_shape<T, LinearShape<kRows, 2, 2>>(params, shared_bytes, config);
  }
}

template <typename T>
cudaError_t launch_linear(LinearParams const& params, int shared_bytes, LaunchConfig const& config) {
  switch (params.tile.rows) {
    case 8: return launch_linear_rows<T, 8>(params, shared_bytes, config);
    case 16: return launch_linear_rows<T, 16>(params, shared_bytes, config);
    case 32: return launch_linear_rows<T, 32>(params, shared_bytes, config);
    case 64: return launch_linear_rows<T, 64>(params, shared_bytes, config);
    case 128: return launch_linear_rows<T, 128>(params, shared_bytes, config);
  }
  return cudaErrorInvalidValue;
}

}  // namespace punica
