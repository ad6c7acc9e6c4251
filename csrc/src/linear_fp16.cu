#include "punica/linear.cuh"

template cudaError_t punica::launch_linear<__half>(punica::LinearParams const&, int, punica::LaunchConfig const&);
