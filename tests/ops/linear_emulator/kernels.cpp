// The kernel of linear.cuh for bf16 and fp16 as a plain function.
#include "punica/linear.cuh"

namespace {

int pretended_device = 0;

// Until the kernel in front has ended, x and the counters are not what they will be, and nobody may write.
void begin_in_front(punica::LinearParams const& params) {
  using namespace punica;
  constexpr int kOther = 77;
  auto* const counters = params.shrink.scratch.counters;
  auto const restore_x = withhold(reinterpret_cast<EmulatedMap const&>(params.x));
  auto const* const y = static_cast<uint16_t const*>(params.y);
  uint16_t const in_y = y[0];
  std::vector<int> const given(counters, counters + kNumCounters);
  std::fill_n(counters, kNumCounters, kOther);
  emulator::end_in_front = [=] {
    if (std::count(counters, counters + kNumCounters, kOther) != kNumCounters || y[0] != in_y) emulator::failure = "something is written before the kernel in front ends";
    restore_x();
    std::copy(given.begin(), given.end(), counters);
  };
}

}  // namespace

extern "C" {

// Of the GPU that is pretended from now on, of this number: so many blocks at once.
void set_linear_room(int blocks, int device) {
  pretended_device = device;
  for (int cluster = 1; cluster <= 8; cluster *= 2) punica::room[cluster] = blocks / cluster;
}

char const* linear_failure() { return emulator::failure.c_str(); }

// What `params` lacks is worked out here: the maps, and what follows from the tile. 1: no such tile, 2: see linear_failure, 3: no room for
// all blocks at once.
int linear(int bf16, punica::LinearParams* params, punica::EmulatedMap const* weight, punica::EmulatedMap const* x, int max_rank, unsigned seed) {
  using namespace punica;
  new (&params->weight) EmulatedMap(*weight);
  new (&params->x) EmulatedMap(*x);
  reinterpret_cast<EmulatedMap&>(params->weight).box_rows = params->tile.height;
  reinterpret_cast<EmulatedMap&>(params->x).box_rows = params->box_rows();
  int const shared_bytes = fit_tile(*params, max_rank);
  if (shared_bytes == 0) return 1;
  begin_in_front(*params);
  emulator::starts_next_late = true;
  LaunchConfig config{static_cast<int>(seed), true, nullptr};
  config.device = pretended_device;
  auto const launch = bf16 ? launch_linear<__nv_bfloat16> : launch_linear<__half>;
  cudaError_t const error = launch(*params, shared_bytes, config);
  return error == cudaErrorCooperativeLaunchTooLarge ? 3 : error == cudaSuccess ? 0 : 2;
}
}
