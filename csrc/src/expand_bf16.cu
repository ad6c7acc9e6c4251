#include "punica/expand.cuh"

template cudaError_t punica::launch_expand<__nv_bfloat16>(punica::ExpandParams const&, punica::LaunchConfig const&);
