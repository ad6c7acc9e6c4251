// The kernels for bf16 and fp16 as plain functions.
#include "punica/embed.cuh"
#include "punica/expand.cuh"
#include "punica/shrink.cuh"

extern "C" {

int shrink(int bf16, punica::ShrinkParams const* params, int num_sms) {
  punica::LaunchConfig const config{num_sms, true, nullptr};
  return bf16 ? punica::launch_shrink<__nv_bfloat16>(*params, config) : punica::launch_shrink<__half>(*params, config);
}

int embed(int bf16, punica::EmbedParams const* params, int num_sms) {
  punica::LaunchConfig const config{num_sms, true, nullptr};
  return bf16 ? punica::launch_embed<__nv_bfloat16>(*params, config) : punica::launch_embed<__half>(*params, config);
}

int expand(int bf16, punica::ExpandParams const* params, int num_sms) {
  punica::LaunchConfig const config{num_sms, true, nullptr};
  return bf16 ? punica::launch_expand<__nv_bfloat16>(*params, config) : punica::launch_expand<__half>(*params, config);
}
}
