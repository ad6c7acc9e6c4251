// The kernel of linear.cuh for bf16 and fp16 as a plain function.
#include "punica/linear.cuh"

extern "C" {

char const* linear_failure() { return emulator::failure.c_str(); }

// What `params` lacks is worked out here: the maps, what follows from the tile, and where the slices begin. 1: no such tile, 2: see linear_failure.
int linear(int bf16, punica::LinearParams* params, punica::EmulatedMap const* weight, punica::EmulatedMap const* x, int max_rank, unsigned seed) {
  using namespace punica;
  new (&params->weight) EmulatedMap(*weight);
  new (&params->x) EmulatedMap(*x);
  reinterpret_cast<EmulatedMap&>(params->weight).box_rows = params->tile.height;
  reinterpret_cast<EmulatedMap&>(params->x).box_rows = params->tile.rows;
  int const step = params->tile.boxes * kLinearBox;
  params->num_steps = (params->shrink.in_features + step - 1) / step;
  params->shrink.scratch.num_blocks = (params->out_features + params->tile.height - 1) / params->tile.height * params->tile.splits;
  int const shared_bytes = fit_tile(*params, max_rank);
  if (shared_bytes == 0) return 1;
  LaunchConfig const config{static_cast<int>(seed), true, nullptr};
  auto const launch = bf16 ? launch_linear<__nv_bfloat16> : launch_linear<__half>;
  return launch(*params, shared_bytes, config) == cudaSuccess ? 0 : 2;
}
}
