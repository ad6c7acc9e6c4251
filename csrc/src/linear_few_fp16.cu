#include "punica/linear_few.cuh"

template cudaError_t punica::launch_linear_few<__half>(punica::LinearParams const&, punica::LaunchConfig const&);
