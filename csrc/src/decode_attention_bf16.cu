#include "punica/decode_attention.cuh"

template cudaError_t punica::launch_decode_attention<__nv_bfloat16>(punica::DecodeAttentionParams const&,
                                                         punica::LaunchConfig const&);
