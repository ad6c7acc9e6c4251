#include "punica/prompt_shrink.cuh"

template cudaError_t punica::launch_prompt<__nv_bfloat16>(punica::PromptParams const&, punica::LaunchConfig const&);
template punica::PromptClusters punica::prompt_clusters<__nv_bfloat16>(punica::Scratch const&, punica::LaunchConfig const&);
