// linear_few for bf16 and fp16 as a plain function.
#include "punica/linear_few.cuh"

extern "C" int linear_few(int bf16, punica::LinearParams const* params, int num_sms) {
  punica::LaunchConfig const config{num_sms, true, nullptr};
  return bf16 ? punica::launch_linear_few<__nv_bfloat16>(*params, config)
              : punica::launch_linear_few<__half>(*params, config);
}
