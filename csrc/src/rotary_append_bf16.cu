#include "punica/rotary_append.cuh"

template cudaError_t punica::launch_rotary_append<__nv_bfloat16>(punica::RotaryAppendParams const&, punica::LaunchConfig const&);
