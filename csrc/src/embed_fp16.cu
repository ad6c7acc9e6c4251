#include "punica/embed.cuh"

template cudaError_t punica::launch_embed<__half>(punica::EmbedParams const&, punica::LaunchConfig const&);
