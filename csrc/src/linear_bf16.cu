#include "punica/linear.cuh"

template cudaError_t punica::launch_linear<__nv_bfloat16>(punica::LinearParams const&, int, punica::LaunchConfig const&);
