// decode_attention for bf16 and fp16 as a plain function.
#include "punica/decode_attention.cuh"

extern "C" int decode_attention(int bf16, punica::DecodeAttentionParams const* params, int num_sms) {
  punica::LaunchConfig const config{num_sms, true, nullptr};
  return bf16 ? punica::launch_decode_attention<__nv_bfloat16>(*params, config)
              : punica::launch_decode_attention<__half>(*params, config);
}
