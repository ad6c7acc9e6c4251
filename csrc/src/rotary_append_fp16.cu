#include "punica/rotary_append.cuh"

template cudaError_t punica::launch_rotary_append<__half>(punica::RotaryAppendParams const&, punica::LaunchConfig const&);
