// Stands in for csrc/include/punica/hopper.cuh.
#pragma once

#include <cuda.h>

#include "punica/cluster.cuh"

namespace punica {

// A matrix as the tests describe it, in the place of what the driver makes.
struct EmulatedMap {
  uint16_t const* data;
  int64_t columns;
  int64_t rows;
  int64_t stride;  // elements
  int64_t box_rows;
};

// Replaces what is in the matrix by NaN, until the result is called.
inline std::function<void()> withhold(EmulatedMap const& matrix) {
  auto const for_each = [=, data = const_cast<uint16_t*>(matrix.data)](auto visit) {
    for (int64_t row = 0; row < matrix.rows; ++row)
      for (int64_t column = 0; column < matrix.columns; ++column) visit(data[row * matrix.stride + column]);
  };
  std::vector<uint16_t> kept;
  for_each([&](uint16_t& value) { kept.push_back(std::exchange(value, 0xffff)); });
  return [=] { for_each([next = kept.begin()](uint16_t& value) mutable { value = *next++; }); };
}

inline uint32_t shared_address(void const* pointer) { return static_cast<uint32_t>(static_cast<char const*>(pointer) - emulator::own_block().shared.data()); }
inline uint32_t kept(uint32_t value) { return value; }

inline uint32_t load_shared4(uint32_t address) {
  uint32_t out;
  std::memcpy(&out, emulator::at(address, 4), 4);
  return out;
}
inline uint2 load_shared8(uint32_t address) {
  uint2 out;
  std::memcpy(&out, emulator::at(address, 8), 8);
  return out;
}
inline uint2 load_shared8_if(bool wanted, uint32_t address) { return wanted ? load_shared8(address) : make_uint2(0, 0); }
inline uint4 load_shared16(uint32_t address) {
  uint4 out;
  std::memcpy(&out, emulator::at(address, 16), 16);
  return out;
}

inline emulator::CopyBarrier& barrier_at(uint32_t address) {
  auto& barriers = emulator::own_block().copies;
  auto const found = barriers.find(address);
  if (found == barriers.end()) emulator::fail("a barrier is used before it is made");
  return found->second;
}
inline void init_barrier(uint32_t barrier, int arrivals) {
  if (!emulator::own_block().copies.emplace(barrier, emulator::CopyBarrier{arrivals}).second) emulator::fail("a barrier is made twice");
}
inline void arrive_for(uint32_t barrier, int bytes) {
  auto& state = barrier_at(barrier);
  if (++state.arrived > state.expected) emulator::fail("more arrive at a barrier than it expects");
  state.bytes += bytes;
  emulator::advance(state);
}
inline void arrive(uint32_t barrier) { arrive_for(barrier, 0); }
inline void await(uint32_t barrier, uint32_t parity) {
  auto const& state = barrier_at(barrier);
  if ((state.phase & 1) == parity) emulator::yield([&state, parity] { return (state.phase & 1) != parity; });
}

inline int load_acquire(int const* pointer) { return *pointer; }
inline void fence_copies_from_memory() {}
inline void fence_barriers() {}
inline void pause() {
  emulator::self->polls = true;
  emulator::yield(nullptr);
}

enum class Keep { kNormal, kFirst, kLast };

inline void ask(uint32_t barrier, int bytes, std::function<void()> move) {
  barrier_at(barrier);
  emulator::grid->copies.push_back({emulator::self->block.x, barrier, bytes, std::move(move)});
}

// The box lies in rows of 128 bytes, whose sixteenths are swapped as the tensor core wants them.
inline void copy_box(uint32_t to, CUtensorMap const& map, int column, int row, uint32_t barrier, Keep) {
  auto const& matrix = reinterpret_cast<EmulatedMap const&>(map);
  int const bytes = static_cast<int>(matrix.box_rows) * 128;
  if (to % 1024 != 0) emulator::fail("a box does not begin on 1024 bytes");
  char* const base = emulator::at(to, 16);
  emulator::at(to + bytes - 16, 16);
  ask(barrier, bytes, [=, &matrix] {
    for (int r = 0; r < matrix.box_rows; ++r)
      for (int c = 0; c < 64; ++c) {
        uint16_t const value = row + r < matrix.rows && column + c < matrix.columns ? matrix.data[(row + r) * matrix.stride + column + c] : 0;
        std::memcpy(base + r * 128 + (c / 8 ^ r % 8) * 16 + c % 8 * 2, &value, 2);
      }
  });
}

// Of a map with `columns` / 8 starts in each row.
inline void copy_box_at(uint32_t to, CUtensorMap const& map, int row, int start, uint32_t barrier) {
  auto const& matrix = reinterpret_cast<EmulatedMap const&>(map);
  int const bytes = static_cast<int>(matrix.box_rows) * 128;
  if (to % 1024 != 0) emulator::fail("a box does not begin on 1024 bytes");
  if (row < 0 || start < 0 || start >= matrix.columns / 8) emulator::fail("a row starts outside");
  char* const base = emulator::at(to, 16);
  emulator::at(to + bytes - 16, 16);
  ask(barrier, bytes, [=, &matrix] {
    for (int r = 0; r < matrix.box_rows; ++r)
      for (int c = 0; c < 64; ++c) {
        uint16_t const value = row + r < matrix.rows ? matrix.data[(row + r) * matrix.columns + start * 8 + c] : 0;
        std::memcpy(base + r * 128 + (c / 8 ^ r % 8) * 16 + c % 8 * 2, &value, 2);
      }
  });
}

inline void copy_bulk(uint32_t to, void const* from, int bytes, uint32_t barrier) {
  if (bytes <= 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) emulator::fail("a copy of no multiple of 16 bytes");
  char* const begin = emulator::at(to, 16);
  emulator::at(to + bytes - 16, 16);
  ask(barrier, bytes, [=] { std::memcpy(begin, from, bytes); });
}

inline void fetch_map(CUtensorMap const&) {}

inline uint64_t operand_at(uint32_t address) { return address >> 4; }
inline void begin_products() {}
inline void commit_products() { emulator::self->products.emplace_back(); }

template <int kPending>
void await_products() {
  auto& groups = emulator::self->products;
  while (groups.size() > kPending + 1) {
    for (auto const& product : groups.front()) product.run();
    groups.erase(groups.begin());
  }
  emulator::meet_warp();  // the instruction is the warp's: no lane goes on before the others' products are done
}

inline uint32_t address_in_block(uint32_t address, int block) {
  if (block < 0 || block >= emulator::grid->cluster_blocks) emulator::fail("no such block in the cluster");
  return address | static_cast<uint32_t>(block + 1) << emulator::kBlockShift;
}

inline void store_turned(uint32_t address, uint32_t first, uint32_t second) {
  int const lane = threadIdx.x % emulator::kWarp;
  auto const column = emulator::with_warp({first, second, 0, 0, 0, 0}, [&](auto const& lanes) {
    std::array<uint16_t, 8> out{};
    for (int g = 0; g < 8; ++g) out[g] = static_cast<uint16_t>(lanes[4 * g + lane % 8 / 2][lane / 8 % 2] >> 16 * (lane % 2));
    return out;
  });
  if (lane < 16) std::memcpy(emulator::at(address, 16), column.data(), 16);
}

template <int kRegisters>
void give_registers() {}
template <int kRegisters>
void take_registers() {}

inline emulator::CopyBarrier& barrier_in_cluster(uint32_t address) {
  auto& barriers = emulator::grid->blocks[emulator::block_of(address)].copies;
  auto const found = barriers.find(address & ((1u << emulator::kBlockShift) - 1));
  if (found == barriers.end()) emulator::fail("a barrier is used before it is made");
  if (emulator::grid->blocks[emulator::block_of(address)].live == 0) emulator::fail("a block is asked for something when it has ended");
  return found->second;
}

inline void send16(uint32_t address, float4 value, uint32_t barrier) {
  char* const begin = emulator::at(address, 16);
  emulator::at(barrier, 8);
  if (address >> emulator::kBlockShift != barrier >> emulator::kBlockShift) emulator::fail("a barrier of another block than the bytes'");
  barrier_in_cluster(barrier);
  uint32_t const local = barrier & ((1u << emulator::kBlockShift) - 1);
  emulator::grid->copies.push_back({emulator::block_of(address), local, 16, [=] { std::memcpy(begin, &value, 16); }});
}

inline void arrive_in_cluster(uint32_t barrier) {
  auto& state = barrier_in_cluster(barrier);
  if (++state.arrived > state.expected) emulator::fail("more arrive at a barrier than it expects");
  emulator::advance(state);
}

inline void await_in_cluster(uint32_t barrier, uint32_t parity) { await(barrier, parity); }

inline void named_barrier(int number, int threads) { emulator::meet(emulator::own_block().named[number], threads); }

inline int times_asked_for_room = 0;
inline std::map<int, int> room;  // clusters of so many blocks

template <typename Params>
int clusters_at_once(void (*)(Params), int, int cluster, int) {
  ++times_asked_for_room;
  return room[cluster];
}

template <typename Params>
cudaError_t launch_clusters(void (*kernel)(Params), int grid, int block, int cluster, int shared_bytes, Params const& params, LaunchConfig const& config) {
  gridDim.x = grid;
  emulator::thread_body = [&] { kernel(params); };
  return emulator::run_grid(grid, block, cluster, shared_bytes, static_cast<unsigned>(config.num_sms)) ? cudaSuccess : cudaErrorLaunchFailure;
}

}  // namespace punica

#define cudaFuncSetAttribute(...) cudaSuccess
#define cudaGetLastError() cudaSuccess
