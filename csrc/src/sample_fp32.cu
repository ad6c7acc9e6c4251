#include "punica/sample.cuh"

template cudaError_t punica::launch_sample<float>(punica::SampleParams const&, punica::LaunchConfig const&);
