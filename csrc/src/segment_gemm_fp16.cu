#include "punica/segment_gemm.cuh"

template cudaError_t punica::launch_segment_gemm<__half>(punica::SegmentGemmParams const&, punica::LaunchConfig const&);
