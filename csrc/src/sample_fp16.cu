#include "punica/sample.cuh"

template cudaError_t punica::launch_sample<__half>(punica::SampleParams const&, punica::LaunchConfig const&);
