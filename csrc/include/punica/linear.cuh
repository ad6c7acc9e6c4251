// y = x W^T + bias + scale * (x A^T) B^T: a linear layer of at most 128 rows and all that adapters add to it in one kernel, for sm_90a.
//
// A block streams `height` rows of W, its part of K, through a ring of stages in shared memory, and with each stage the step's x: W is the warpgroup
// product's row operand, so that a step's few rows are its N. Meanwhile some warps compute low-rank rows of the step (linear_shrink.cuh). Behind W, B
// comes through the same ring: what one adapter has of the block's columns lies together in memory, so adapters cost their bytes and no launch. They
// are added to the sums in registers. The blocks of a cluster share K, and the adapted rows; each has a share of the columns, whose sums the others send it. What
// comes behind W runs once, and is fetched as it runs: it is short, without copies.
#pragma once

#include <array>
#include <bit>

#include "punica/linear_add.cuh"
#include "punica/linear_adapters.cuh"
#include "punica/linear_params.h"
#include "punica/linear_shrink.cuh"
#include "punica/per_device.h"
#include "punica/wgmma.cuh"

namespace punica {

constexpr int kSumsBarrier = 1;
constexpr int kBegunBarrier = 2;

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

// Sums of sixteen columns that are another block's, `owner`, go there, each to the lane that has the same of its own part of K.
template <int kRows>
__device__ inline void send_sums(uint32_t mail, uint32_t barrier, int owner, float const (&d)[kRows / 2]) {
  uint32_t const to = address_in_block(mail + threadIdx.x % 32 * 16, owner);
  uint32_t const there = address_in_block(barrier, owner);
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) send16(to + j * 512, make_float4(d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]), there);
}

template <int kRows>
__device__ inline void add_sums(uint32_t mail, float (&d)[kRows / 2]) {
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    uint4 const terms = load_shared16(mail + threadIdx.x % 32 * 16 + j * 512);
    d[4 * j] += __uint_as_float(terms.x);
    d[4 * j + 1] += __uint_as_float(terms.y);
    d[4 * j + 2] += __uint_as_float(terms.z);
    d[4 * j + 3] += __uint_as_float(terms.w);
  }
}

// The layer's bias, of sixteen columns from `column` on.
template <typename T, int kRows>
__device__ inline void add_bias(LinearParams const& params, int column, float (&d)[kRows / 2]) {
  T const* const bias = static_cast<T const*>(params.bias);
  int const own = column + static_cast<int>(threadIdx.x) % 32 / 4;
  float const upper = own < params.out_features ? Convert<T>::to_float(bias[own]) : 0.f;
  float const lower = own + 8 < params.out_features ? Convert<T>::to_float(bias[own + 8]) : 0.f;
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    d[4 * j] += upper;
    d[4 * j + 1] += upper;
    d[4 * j + 2] += lower;
    d[4 * j + 3] += lower;
  }
}

// Sixteen columns of the block's part of y in shared memory, from `to` on.
template <typename T, int kRows>
__device__ inline void put_columns(uint32_t to, int pitch, float const (&d)[kRows / 2]) {
  int const lane = threadIdx.x % 32;
  to += lane % 8 * pitch + lane / 8 % 2 * 16;
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j, to += 8 * pitch)
    store_turned(to, Convert<T>::pack(d[4 * j], d[4 * j + 1]), Convert<T>::pack(d[4 * j + 2], d[4 * j + 3]));
}

// The block's part of y, `columns` from `first_column` on, from shared memory. Each thread has the same columns of all its rows.
template <typename T, int kThreads>
__device__ inline void store_rows(LinearParams const& params, uint32_t from, int pitch, int first_column, int columns) {
  int const vectors = min(columns, params.out_features - first_column) / 8;
  if (vectors <= 0) return;
  int const rows = quotient(kThreads, vectors);  // at a time
  int const first = quotient(threadIdx.x, vectors);
  int const column = (static_cast<int>(threadIdx.x) - first * vectors) * 8;
  if (first >= rows) return;
  T* to = static_cast<T*>(params.y) + first * params.y_stride + first_column + column;
  int64_t const step = rows * params.y_stride;
  from += first * pitch + column * 2;
#pragma unroll 2
  for (int row = first; row < params.num_rows; row += rows, to += step, from += rows * pitch) *reinterpret_cast<uint4*>(to) = load_shared16(from);
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
    if (lane == 1) init_barrier(shared_address(&shared.stages.open), max(1, (tile.splits - 1) * (kConsumers / 32)));
    if (lane == 2) init_barrier(shared_address(&shared.stages.mail), 1);
    if (lane == 0) fetch_map(params.weight);
    if (lane == 1) fetch_map(params.x);
    fence_barriers();
  }
  if (role < 2) named_barrier(kBegunBarrier, kConsumers + 64);  // the ring's barriers are ready; who shrinks uses none
  bool const shares = tile.splits > 1;
  if (shares) cluster.arrive_begun();  // nobody sends to a block that has not begun
  LinearRing ring(shared.stages, memory, params.stage_bytes(), params.stages);
  if (role >= 0) {
    if constexpr (Shape::kTakesRegisters) give_registers<Shape::kOtherRegisters>();
    if (role == 0) {
      if (threadIdx.x % 32 == 0) {
        if (shares) arrive_for(shared_address(&shared.stages.mail), params.mail_bytes());
        fill_ring<kRows>(params, ring, first_step, num_steps, first_column);
      }
      __syncwarp();
    } else if (role == 1) {
      ring.skip(num_steps);
      stream_adapters<T>(params, ring, first_column, split);
    } else {
      shrink_items<T>(params.shrink, shared.shrink);
    }
    if (shares) cluster.wait();
    return;
  }
  if constexpr (Shape::kTakesRegisters) take_registers<Shape::kConsumerRegisters>();
  int const own = static_cast<int>(threadIdx.x) / 128 * kParts * kLinearTileRows;  // of the warpgroup's columns, in the tile
  int const group = own + static_cast<int>(threadIdx.x) % 128 / 32 * 16;
  float d[kParts][kRows / 2] = {};
  multiply_steps<T, kRows, kParts>(params, ring, num_steps, own, d);
  add_adapters<T, kRows, kParts>(ring, group, d);
  int const columns = static_cast<int>(kept(params.num_columns()));
  if (shares) {
    bool const in_ring = params.meets_in_ring();
    uint32_t const mail = memory + (in_ring ? 0 : params.ring_bytes());
    cluster.wait();
    if (in_ring) {
      uint32_t const open = shared_address(&shared.stages.open);
      int const lane = threadIdx.x % 32;
      __syncwarp();  // the warp has read the ring
      if (lane < tile.splits && lane != split) arrive_in_cluster(address_in_block(open, lane));
      await(open, 0);
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      int const column = group + part * kLinearTileRows;
      int const owner = quotient(column, columns);
      int const place = (split - (split > owner)) * columns + column - owner * columns;
      if (column < tile.height && owner != split) send_sums<kRows>(mail + place * (kRows * 4), shared_address(&shared.stages.mail), owner, d[part]);
    }
    await_in_cluster(shared_address(&shared.stages.mail), 0);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      int const column = group + part * kLinearTileRows - split * columns;
      if (column < 0 || column >= columns) continue;
#pragma unroll 1
      for (int other = 0; other < tile.splits - 1; ++other) add_sums<kRows>(mail + (other * columns + column) * (kRows * 4), d[part]);
    }
  }
  named_barrier(kSumsBarrier, kConsumers);  // the ring has been read
  uint32_t const out = memory + params.out_offset();
  int const pitch = params.out_pitch(columns);
  int const first_own = first_column + split * columns;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    int const column = group + part * kLinearTileRows - split * columns;  // of the block's
    if (column < 0 || column >= columns) continue;
    if (params.bias != nullptr) add_bias<T, kRows>(params, first_own + column, d[part]);
    put_columns<T, kRows>(out + column * 2, pitch, d[part]);
  }
  named_barrier(kSumsBarrier, kConsumers);
  store_rows<T, kConsumers>(params, out, pitch, first_own, columns);
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

// Clusters of 1, 2, 4 and 8 blocks that a GPU has room for at the same time.
using LinearRoom = std::array<int, 4>;

template <typename T, typename Shape>
cudaError_t launch_linear_shape(LinearParams const& params, int shared_bytes, LaunchConfig const& config) {
  static PerDevice<LinearRoom> rooms;
  auto* const kernel = linear_kernel<T, Shape>;
  cudaError_t const allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kLinearSharedBytes);
  if (allowed != cudaSuccess) return allowed;
  // Blocks wait for what others shrink: if one could begin only when another has ended, they would wait for ever.
  LinearRoom const room = rooms.of(config.device, [&] {
    LinearRoom clusters{};
    for (size_t i = 0; i < clusters.size(); ++i) clusters[i] = clusters_at_once(kernel, Shape::kThreads, 1 << i, kLinearSharedBytes);
    static_cast<void>(cudaGetLastError());  // that there is none is no error of a later call
    return clusters;
  });
  auto const splits = static_cast<unsigned>(params.tile.splits);
  if (room[std::countr_zero(splits)] * params.tile.splits < params.shrink.scratch.num_blocks) return cudaErrorCooperativeLaunchTooLarge;
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
