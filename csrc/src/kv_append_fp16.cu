#include "punica/kv_append.cuh"

template cudaError_t punica::launch_kv_append<__half>(punica::KvAppendParams const&, punica::LaunchConfig const&);
