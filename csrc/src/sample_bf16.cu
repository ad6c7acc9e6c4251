#include "punica/sample.cuh"

template cudaError_t punica::launch_sample<__nv_bfloat16>(punica::SampleParams const&, punica::LaunchConfig const&);
