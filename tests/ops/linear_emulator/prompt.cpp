// The kernel of prompt_shrink.cuh for bf16 and fp16 as a plain function.
#include "punica/prompt_shrink.cuh"

namespace {

// Until the kernel in front has ended, x is not what it will be, and nobody may write.
void begin_in_front(punica::PromptParams const& params) {
  auto const restore_x = punica::withhold(reinterpret_cast<punica::EmulatedMap const&>(params.x));
  auto const* const hidden = static_cast<uint16_t const*>(params.shrink.scratch.hidden);
  int64_t const elements = int64_t{params.shrink.scratch.num_rows} * params.shrink.tables.slices * params.shrink.tables.plan[punica::kRankPitch];
  std::vector<uint16_t> const before(hidden, hidden + elements);
  emulator::end_in_front = [=] {
    if (!std::equal(before.begin(), before.end(), hidden)) emulator::failure = "something is written before the kernel in front ends";
    restore_x();
  };
}

}  // namespace

extern "C" {

char const* prompt_failure() { return emulator::failure.c_str(); }

// Of the GPU that is pretended: clusters at once of a size.
void set_prompt_room(int large, int small) { punica::room = {{punica::kLargeCluster, large}, {punica::kSmallCluster, small}}; }

int times_asked_for_prompt_room() { return punica::times_asked_for_room; }

// Blocks of each cluster that a step of so many rows is shrunk in, and in `count` how many clusters.
int prompt_clusters_of(int num_rows, int num_blocks, int device, int* count) {
  punica::Scratch scratch{};
  scratch.num_rows = num_rows;
  scratch.num_blocks = num_blocks;
  punica::LaunchConfig config{};
  config.device = device;
  punica::PromptClusters const clusters = punica::prompt_clusters<__half>(scratch, config);
  *count = clusters.count;
  return clusters.blocks;
}

// 1: the kernel does not take it, 2: see prompt_failure.
int prompt(int bf16, punica::PromptParams* params, punica::EmulatedMap const* x, int64_t arena_elements, int device, unsigned seed) {
  using namespace punica;
  LaunchConfig const config{static_cast<int>(seed), true, nullptr, true, device};
  if (!takes_prompt(params->shrink, config)) return 1;
  new (&params->x) EmulatedMap{x->data, x->columns, x->rows, x->stride, kPromptBoxRows};
  new (&params->tall_x) EmulatedMap{x->data, x->columns, x->rows, x->stride, kMaxTileRows};
  ArenaMatrix const matrix(arena_elements, params->shrink.in_features);
  auto const* const begin = static_cast<uint16_t const*>(params->shrink.tables.arena) - matrix.shift;
  new (&params->a) EmulatedMap{begin, params->shrink.in_features, matrix.rows, params->shrink.in_features, kPromptBoxRows};
  new (&params->tall_a) EmulatedMap{begin, params->shrink.in_features, matrix.rows, params->shrink.in_features, kMaxTileRows};
  params->a_shift = matrix.shift;
  int64_t const behind = int64_t{params->shrink.in_features} * matrix.rows + kPromptColumns - kStartElements - matrix.shift;
  if (behind > arena_elements) {
    emulator::failure = "a box can reach behind the arena";
    return 2;
  }
  begin_in_front(*params);
  return (bf16 ? launch_prompt<__nv_bfloat16> : launch_prompt<__half>)(*params, config) == cudaSuccess ? 0 : 2;
}
}
