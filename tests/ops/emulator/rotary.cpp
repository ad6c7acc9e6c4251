// rotary_append for bf16 and fp16 as a plain function.
#include "punica/rotary_append.cuh"

extern "C" int64_t prefetched() { return emulator::prefetched; }

extern "C" int rotary_append(int bf16, punica::RotaryAppendParams const* params) {
  punica::LaunchConfig const config{3, true, nullptr};
  return bf16 ? punica::launch_rotary_append<__nv_bfloat16>(*params, config)
              : punica::launch_rotary_append<__half>(*params, config);
}
