// The sampling kernels as plain functions.
#include "punica/sample.cuh"

using namespace punica;

namespace {

SampleParams const* current = nullptr;

template <typename T>
int sample(SampleParams const& params, bool cached, int num_blocks, unsigned seed) {
  std::mt19937 random(seed);
  current = &params;
  emulator::run_thread = params.rows == nullptr ? [] { greedy_kernel<T>(*current); }
                         : cached               ? [] { sample_kernel<T, true>(*current); }
                                                : [] { sample_kernel<T, false>(*current); };
  int const words = cached ? block_width(params.vocab_size, num_blocks) : 0;
  for (int row = 0; row < params.num_rows; ++row)
    if (!emulator::run_cluster(row * num_blocks, num_blocks, words, random)) return 1;
  return 0;
}

}  // namespace

extern "C" {

// dtype: 0 float32, 1 bfloat16, 2 float16. Not 0 if the threads wait for each other for ever.
int sample(int dtype, SampleParams const* params, int cached, int num_blocks, unsigned seed) {
  if (dtype == 0) return sample<float>(*params, cached, num_blocks, seed);
  if (dtype == 1) return sample<__nv_bfloat16>(*params, cached, num_blocks, seed);
  return sample<__half>(*params, cached, num_blocks, seed);
}

// The kernel's weights of one row: its exp is this machine's, not torch's.
void weights(float const* scores, int count, float largest, float temperature, int64_t* out) {
  for (int i = 0; i < count; ++i) out[i] = weight_of(weight_key(scores[i], largest, temperature));
}
}
