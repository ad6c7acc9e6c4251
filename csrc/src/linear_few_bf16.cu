#include "punica/linear_few.cuh"

template cudaError_t punica::launch_linear_few<__nv_bfloat16>(punica::LinearParams const&, punica::LaunchConfig const&);
