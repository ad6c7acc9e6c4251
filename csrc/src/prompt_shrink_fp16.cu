#include "punica/prompt_shrink.cuh"

template cudaError_t punica::launch_prompt<__half>(punica::PromptParams const&, punica::LaunchConfig const&);
template punica::PromptClusters punica::prompt_clusters<__half>(punica::Scratch const&, punica::LaunchConfig const&);
