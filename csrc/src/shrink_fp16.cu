#include "punica/shrink.cuh"

template cudaError_t punica::launch_shrink<__half>(punica::ShrinkParams const&, punica::LaunchConfig const&);
