#include "punica/shrink.cuh"

template cudaError_t punica::launch_shrink<__nv_bfloat16>(punica::ShrinkParams const&, punica::LaunchConfig const&);
