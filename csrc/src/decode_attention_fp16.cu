#include "punica/decode_attention.cuh"

template cudaError_t punica::launch_decode_attention<__half>(punica::DecodeAttentionParams const&,
                                                         punica::LaunchConfig const&);
