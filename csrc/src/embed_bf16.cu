#include "punica/embed.cuh"

template cudaError_t punica::launch_embed<__nv_bfloat16>(punica::EmbedParams const&, punica::LaunchConfig const&);
