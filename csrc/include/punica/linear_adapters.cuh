// What adapters add in the kernel of linear.cuh: one warp brings B and the low-rank rows into the ring. linear_add.cuh adds their products.
#pragma once

#include <cstddef>

#include "punica/hopper.cuh"
#include "punica/linear_params.h"
#include "punica/linear_shrink.cuh"
#include "punica/tile.cuh"

namespace punica {

#ifdef PUNICA_HOPPER

// One adapter in a stage. Packed, so that one load gets it.
struct alignas(16) AdapterItem {
  uint32_t rows;  // first | end << 8 | lora_rank << 16
  int b_offset;   // bytes in the stage: B [columns, pitch]
  int row_bytes;  // of B
  float scale;

  AdapterItem() = default;
  __device__ explicit AdapterItem(uint4 raw)
      : rows(raw.x), b_offset(static_cast<int>(raw.y)), row_bytes(static_cast<int>(raw.z)), scale(__uint_as_float(raw.w)) {}
  __device__ int first_row() const { return rows & 0xff; }
  __device__ int end_row() const { return rows >> 8 & 0xff; }
  __device__ int lora_rank() const { return rows >> 16; }
};

// What lies in a stage that holds adapters: the low-rank rows [first_row, end_row), and B of those that have an adapter, in the order of their rows.
struct alignas(16) AdapterStage {
  int num_items;  // negative: there is nothing more
  int first_row;
  int end_row;
  int hidden_offset;  // bytes: of the first row, in the slice of the items
  int hidden_pitch;   // bytes
  int first_column;   // of all items, in the block's tile
  int num_columns;
  int whole_ranks;  // every lora_rank is a multiple of sixteen
};

constexpr int kStageItems = 32;
constexpr int kPrefetchBytes = 128 * 1024;  // of a block: more would not stay in the L2 cache

struct LinearStages {
  uint64_t full[kMaxLinearStages];  // barriers
  uint64_t empty[kMaxLinearStages];
  uint64_t asked;  // for all of W and x
  uint64_t open;   // the rings of the other blocks of the cluster have been read
  uint64_t mail;   // their sums have come
  AdapterStage adapters[kMaxLinearStages];
  AdapterItem items[kMaxLinearStages][kStageItems];
};

// A thread's way around the stages; producers and consumers go the same way. Addresses are of shared memory.
class LinearRing {
 public:
  __device__ LinearRing(LinearStages& stages, uint32_t memory, int stage_bytes, int count)
      : stages_(stages), start_(kept(shared_address(&stages))), memory_(memory), stage_bytes_(stage_bytes), count_(count) {}

  __device__ uint32_t await_full() const {
    await(full(), round_ & 1);
    return memory_ + index_ * stage_bytes_;
  }
  __device__ uint32_t await_empty() const {
    await(empty(index_), ~round_ & 1);
    return memory_ + index_ * stage_bytes_;
  }
  __device__ uint32_t full() const { return start_ + offsetof(LinearStages, full) + index_ * 8; }
  __device__ uint32_t items() const { return start_ + offsetof(LinearStages, items) + index_ * (kStageItems * sizeof(AdapterItem)); }
  __device__ int stage_bytes() const { return stage_bytes_; }

  // Adapters come behind W and x, in the order in which they are asked for.
  __device__ void begin_adapters() const { arrive(start_ + offsetof(LinearStages, asked)); }
  __device__ void await_adapters() const { await(start_ + offsetof(LinearStages, asked), 0); }

  // What the stage holds, for who reads it and for who writes it.
  __device__ AdapterStage adapters() const {
    uint32_t const at = start_ + offsetof(LinearStages, adapters) + index_ * sizeof(AdapterStage);
    uint4 const low = load_shared16(at), high = load_shared16(at + 16);
    return {static_cast<int>(low.x),  static_cast<int>(low.y),  static_cast<int>(low.z),  static_cast<int>(low.w),
            static_cast<int>(high.x), static_cast<int>(high.y), static_cast<int>(high.z), static_cast<int>(high.w)};
  }
  __device__ void set_adapters(AdapterStage const& stage) { stages_.adapters[index_] = stage; }
  __device__ void set_item(int number, AdapterItem const& item) { stages_.items[index_][number] = item; }

  __device__ void advance() {
    if (++index_ == count_) {
      index_ = 0;
      ++round_;
    }
  }
  // As so many times `advance`.
  __device__ void skip(int times) {
    round_ += (index_ + times) / count_;
    index_ = (index_ + times) % count_;
  }
  // The warp has read the stage, or the one before.
  __device__ void release() const { release(index_); }
  __device__ void release_last() const { release(index_ == 0 ? count_ - 1 : index_ - 1); }

 private:
  __device__ uint32_t empty(int index) const { return start_ + offsetof(LinearStages, empty) + index * 8; }
  __device__ void release(int index) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(empty(index));
  }

  LinearStages& stages_;
  uint32_t start_;
  uint32_t memory_;
  int stage_bytes_;
  int count_;
  int index_ = 0;
  int round_ = 0;
};

// A lane's segment in one slice, and where in memory the whole of it is.
template <typename T>
struct AdapterSegment {
  int first_row;
  int end_row;
  int lora_rank;
  float scale;
  T const* b;  // of the first column that is wanted

  __device__ int row_bytes() const { return 2 * round_up(lora_rank, kRowAlignment); }
};

// How a warp brings adapters into the ring: some columns of one slice.
template <typename T>
struct AdapterStream {
  LinearRing& ring;
  T const* hidden;    // of the step's first row, all slices
  int hidden_pitch;   // bytes
  int slice_offset;   // bytes from a row to its ranks of the slice
  int first_column;   // in the block's tile
  int num_columns;
  ShrinkParams const& shrink;
  bool& must_wait;  // for the low-rank rows

  // A stage with items of the lanes that are `taken`: `offset` is where a lane's B comes. Column `skipped` is the first that is wanted.
  __device__ void put(unsigned taken, AdapterSegment<T> const& segment, int offset, int first_row, int end_row, int total, int skipped, int columns) {
    int const lane = threadIdx.x % 32;
    bool const own = taken >> lane & 1;
    uint32_t const to = ring.await_empty();
    int const bytes = columns * segment.row_bytes();
    if (own) {
      int const begin = max(segment.first_row, first_row);
      int const end = min(segment.end_row, end_row);
      AdapterItem item;
      item.rows = begin | end << 8 | segment.lora_rank << 16;
      item.b_offset = offset;
      item.row_bytes = segment.row_bytes();
      item.scale = segment.scale;
      ring.set_item(__popc(taken & ((1u << lane) - 1)), item);
    }
    int const hidden_bytes = (end_row - first_row) * hidden_pitch;
    bool const whole = !__any_sync(~0u, own && segment.lora_rank % 16 != 0);
    if (lane == 0) ring.set_adapters({__popc(taken), first_row, end_row, total + slice_offset, hidden_pitch, first_column + skipped, columns, whole});
    __syncwarp();
    if (lane == 0) arrive_for(ring.full(), total + hidden_bytes);
    __syncwarp();
    if (own) copy_bulk(to + offset, segment.b + static_cast<int64_t>(skipped) * (segment.row_bytes() / 2), bytes, ring.full());
    if (must_wait) await_hidden(shrink);
    must_wait = false;
    if (lane == 0) copy_bulk(to + total, reinterpret_cast<char const*>(hidden) + static_cast<int64_t>(first_row) * hidden_pitch, hidden_bytes, ring.full());
    ring.advance();
  }

  // A segment that fills more than a stage, the same in all lanes: some rows and some columns at a time.
  __device__ void put_large(AdapterSegment<T> const& segment) {
    int const most_rows = min(segment.end_row - segment.first_row, (ring.stage_bytes() - 16 * segment.row_bytes()) / hidden_pitch);
    int const most_columns = (ring.stage_bytes() - most_rows * hidden_pitch) / segment.row_bytes();
#pragma unroll 1
    for (int row = segment.first_row; row < segment.end_row; row += most_rows)
#pragma unroll 1
      for (int column = 0; column < num_columns; column += most_columns) {
        int const columns = min(most_columns, num_columns - column);
        put(1, segment, 0, row, min(row + most_rows, segment.end_row), columns * segment.row_bytes(), column, columns);
      }
  }

  // The segments of the lanes in `todo`, as many in a stage as there is room for.
  __device__ void put_all(unsigned todo, AdapterSegment<T> const& segment) {
    int const lane = threadIdx.x % 32;
    int const bytes = todo >> lane & 1 ? num_columns * segment.row_bytes() : 0;
    int end = bytes;  // of all lanes up to this one
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      int const before = __shfl_up_sync(~0u, end, distance);
      if (lane >= distance) end += before;
    }
#pragma unroll 1
    while (todo != 0) {
      int const first = __ffs(static_cast<int>(todo)) - 1;
      int const start = __shfl_sync(~0u, end - bytes, first);
      int const first_row = __shfl_sync(~0u, segment.first_row, first);
      unsigned const taken = __ballot_sync(~0u, (todo >> lane & 1) && end - start + (segment.end_row - first_row) * hidden_pitch <= ring.stage_bytes());
      if (taken == 0) {
        AdapterSegment<T> large;
        large.first_row = first_row;
        large.end_row = __shfl_sync(~0u, segment.end_row, first);
        large.lora_rank = __shfl_sync(~0u, segment.lora_rank, first);
        large.scale = __shfl_sync(~0u, segment.scale, first);
        large.b = reinterpret_cast<T const*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(segment.b), first));
        put_large(large);
        todo &= todo - 1;
        continue;
      }
      int const last = 31 - __clz(static_cast<int>(taken));
      int const total = __shfl_sync(~0u, end, last) - start;
      int const end_row = __shfl_sync(~0u, segment.end_row, last);
      put(taken, segment, end - bytes - start, first_row, end_row, total, 0, num_columns);
      todo &= ~taken;
    }
  }
};

// All that adapters of the step have for the block's columns, of the rows that are the block's. By a whole warp, which waits for shrink, and for the warp
// that fills the ring before.
template <typename T>
__device__ inline void stream_adapters(LinearParams const& params, LinearRing& ring, int first_column, int split) {
  int const lane = threadIdx.x % 32;
  Tables const& tables = params.shrink.tables;
  int4 const header = load_metadata(reinterpret_cast<int4 const*>(tables.plan));
  int const rank_pitch = load_work_list(tables, params.shrink.scratch).rank_pitch;
  int const num_segments = header.x;
  int const end_column = min(first_column + params.tile.height, params.out_features);
  int const eights = (params.num_rows + 7) / 8;
  int const first_row = eights * split / params.tile.splits * 8;
  int const end_row = eights * (split + 1) / params.tile.splits * 8;
  bool must_wait = true;
#pragma unroll 1
  for (int start = 0; start < num_segments; start += 32) {
    int const index = start + lane;
    AdapterSegment<T> segment{};
    int slot = -1;
    if (index < num_segments) {
      segment.first_row = max(first_row, __ldg(tables.plan + header.z + index));
      segment.end_row = min(end_row, __ldg(tables.plan + header.z + index + 1));
      slot = __ldg(tables.plan + header.w + index);
    }
#pragma unroll 1
    for (int slice = 0; slice < tables.slices; ++slice) {
      int const begin = max(first_column, params.columns[slice]);
      int const end = min(end_column, params.columns[slice] + params.widths[slice]);
      if (begin >= end) continue;
      TableRecord record{};
      if (slot >= 0) record = load_record(tables, slice, slot);
      demand(record.lora_rank <= rank_pitch);
      segment.lora_rank = record.lora_rank;
      segment.scale = record.scale;
      segment.b = static_cast<T const*>(tables.arena) + record.b_offset + static_cast<int64_t>(begin - params.columns[slice]) * (segment.row_bytes() / 2);
      unsigned const todo = __ballot_sync(~0u, record.lora_rank > 0 && segment.first_row < segment.end_row);
      int const bytes = (end - begin) * segment.row_bytes();
      if (must_wait) {
        if ((todo >> lane & 1) && bytes * __popc(todo) <= kPrefetchBytes) prefetch(segment.b, bytes);
        ring.await_adapters();
      }
      auto const* const hidden = static_cast<T const*>(params.shrink.scratch.hidden);
      AdapterStream<T> stream{ring, hidden, tables.slices * rank_pitch * 2, slice * rank_pitch * 2, begin - first_column, end - begin, params.shrink, must_wait};
      stream.put_all(todo, segment);
    }
  }
  ring.await_adapters();
  if (must_wait) await_hidden(params.shrink);
  ring.await_empty();
  if (lane == 0) {
    ring.set_adapters({-1});
    arrive(ring.full());
  }
  leave_hidden(params.shrink);
}

#endif

}  // namespace punica
