#include "punica/segment_gemm.cuh"

template cudaError_t punica::launch_segment_gemm<__nv_bfloat16>(punica::SegmentGemmParams const&, punica::LaunchConfig const&);
