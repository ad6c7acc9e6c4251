// What lies in the shared memory of a block of prompt_shrink.cuh: stages of x and A, and the sums that other blocks send.
#pragma once

#include "punica/cluster.cuh"
#include "punica/hopper.cuh"
#include "punica/prompt_walk.cuh"

namespace punica {

constexpr int kPromptSharedBytes = 112 << 10;
constexpr int kPromptMemory = kPromptSharedBytes - 1024;  // from a multiple of 1024 on

constexpr int kProductGroups = 4;  // of a product of 64 ranks
constexpr int kMostProducts = 3;   // a step: more have no registers
constexpr int kPassGroups = kMostProducts * kProductGroups;
constexpr int kMailProducts = 2;
constexpr int kMailGroups = kMailProducts * kProductGroups;

constexpr int kPromptXBytes = kMaxTileRows * 2 * kPromptColumns;
constexpr int kPromptBoxBytes = kPromptBoxRows * 2 * kPromptColumns;
constexpr int kMostStages = 10;
constexpr int kOctetBytes = 32 * 16;  // eight rows of a group: four ranks of a row from each lane of a warp
constexpr int kOctets = kMaxTileRows / 8;
static_assert(kPromptBoxRows == kGroupRanks);

#ifdef PUNICA_HOPPER

// What a block has in shared memory beside stages and mail: barriers.
struct PromptShared {
  uint64_t full[kMostStages];
  uint64_t empty[kMostStages];
  uint64_t mail_there;
  uint64_t mail_read;
};

// How the shared memory is shared out: the same in all blocks, for the most groups that a step can have.
struct PromptLayout {
  int rank_pitch;
  int stage_bytes;
  int num_stages;
  int mail_groups;

  __device__ PromptLayout(Tables const& tables, Scratch const& scratch) : rank_pitch(load_work_list(tables, scratch).rank_pitch) {
    int const groups = min(tables.slices * ((rank_pitch + kGroupRanks - 1) / kGroupRanks), kPassGroups);
    mail_groups = min(groups, kMailGroups);
    stage_bytes = kPromptXBytes + groups * kPromptBoxBytes;
    num_stages = min((kPromptMemory - mail_bytes()) / stage_bytes, kMostStages);
  }
  __device__ int mail_bytes() const { return mail_groups * kOctets * kOctetBytes; }
};
static_assert(2 * (kPromptXBytes + kPassGroups * kPromptBoxBytes) + kMailGroups * kOctets * kOctetBytes <= kPromptMemory);

// A thread's way around the stages. Addresses are of shared memory.
class StageRing {
 public:
  __device__ StageRing(PromptShared& shared, uint32_t memory, PromptLayout const& layout)
      : full_(kept(shared_address(shared.full))),
        empty_(kept(shared_address(shared.empty))),
        memory_(memory),
        stage_bytes_(layout.stage_bytes),
        num_stages_(layout.num_stages) {}

  __device__ uint32_t memory() const { return memory_ + index_ * stage_bytes_; }
  __device__ uint32_t full() const { return full_ + index_ * 8; }
  __device__ uint32_t empty() const { return empty_ + index_ * 8; }
  __device__ void await_full() const { await(full(), round_ & 1); }
  __device__ void await_empty() const { await(empty(), ~round_ & 1); }
  __device__ void advance() {
    if (++index_ == num_stages_) {
      index_ = 0;
      ++round_;
    }
  }

 private:
  uint32_t full_;
  uint32_t empty_;
  uint32_t memory_;
  int stage_bytes_;
  int num_stages_;
  int index_ = 0;
  int round_ = 0;
};

// The mail of a block: sums that the blocks of the cluster send it. They all send the next when all have read the last.
template <int kBlocks>
class Mail {
  static constexpr int kOwnOctets = kOctets / kBlocks;

 public:
  __device__ Mail(PromptShared& shared, uint32_t memory, int num_groups, int block)
      : there_(kept(shared_address(&shared.mail_there))),
        read_(kept(shared_address(&shared.mail_read))),
        memory_(memory + threadIdx.x % 32 / 4 * 64),
        block_bytes_(num_groups * kOwnOctets * kOctetBytes),
        block_(block) {}

  __device__ void await_read() const { await(read_, ~count_ & 1); }

  // Rows go to the blocks that sum them. The last groups may be missing.
  template <int kProducts, int kSums>
  __device__ void send(float const (&d)[kProducts][kSums], int first_product, int num_groups) const {
    constexpr int kGroups = kSums / 8;
    int const warp = threadIdx.x / 32;
    uint32_t const to = memory_ + block_ * block_bytes_ + threadIdx.x % 4 * 16;
    if (threadIdx.x == 0) arrive_for(there_, num_groups * kOctets * kOctetBytes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const octet = 2 * warp + half;
      uint32_t const to_there = address_in_block(to + octet % kOwnOctets * kOctetBytes, octet / kOwnOctets);
      uint32_t const there = address_in_block(there_, octet / kOwnOctets);
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
        if (i / kMailProducts * kMailProducts != first_product) continue;
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
          int const group = (i - first_product) * kGroups + j;
          float const* const own = d[i] + 8 * j + 2 * half;
          if (group < num_groups) send16(to_there + group * kOwnOctets * kOctetBytes, make_float4(own[0], own[1], own[4], own[5]), there);
        }
      }
    }
  }

  // Bytes that come from other blocks are seen by who waits at the scope of the cluster.
  __device__ void await_there() const { await_in_cluster(there_, count_ & 1); }

  // Four ranks of a row of an octet of a group, summed over the blocks. A lane of a product has two pairs of ranks, eight apart.
  __device__ float4 sum(int index) const {
    int const quad = threadIdx.x % 4;
    uint32_t const from = memory_ + index * kOctetBytes + quad % 2 * 32 + quad / 2 * 8;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      uint2 const low = load_shared8(from + block * block_bytes_);
      uint2 const high = load_shared8(from + block * block_bytes_ + 16);
      sum = added(sum, make_float4(__uint_as_float(low.x), __uint_as_float(low.y), __uint_as_float(high.x), __uint_as_float(high.y)));
    }
    return sum;
  }

  // The warp has read its part.
  __device__ void give_back() {
    __syncwarp();
    if (threadIdx.x % 32 < kBlocks) arrive_in_cluster(address_in_block(read_, threadIdx.x % 32));
    ++count_;
  }

 private:
  uint32_t there_;
  uint32_t read_;
  uint32_t memory_;
  int block_bytes_;
  int block_;
  int count_ = 0;
};

#endif

}  // namespace punica
