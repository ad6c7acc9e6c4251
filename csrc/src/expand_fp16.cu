#include "punica/expand.cuh"

template cudaError_t punica::launch_expand<__half>(punica::ExpandParams const&, punica::LaunchConfig const&);
