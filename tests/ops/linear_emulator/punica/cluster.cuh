// Stands in for csrc/include/punica/cluster.cuh.
#pragma once

#include "punica/primitives.cuh"

namespace punica {

struct Cluster {
  void arrive() const { emulator::self->cluster_phase = emulator::arrive(barrier(), emulator::grid->cluster_blocks * emulator::grid->threads); }
  void arrive_begun() const { arrive(); }
  void wait() const { emulator::wait(barrier(), emulator::self->cluster_phase); }

 private:
  static emulator::Barrier& barrier() { return emulator::grid->clusters[emulator::self->block.x / emulator::grid->cluster_blocks]; }
};

template <typename V>
V& block_shared() {
  static_assert(sizeof(V) <= emulator::kStaticBytes);
  return *reinterpret_cast<V*>(emulator::own_block().shared.data());
}

inline uint32_t* block_cache() { return reinterpret_cast<uint32_t*>(emulator::own_block().shared.data() + emulator::kStaticBytes); }

}  // namespace punica
