#include "punica/kv_append.cuh"

template cudaError_t punica::launch_kv_append<__nv_bfloat16>(punica::KvAppendParams const&, punica::LaunchConfig const&);
