#include "punica/prompt_shrink.cuh"

template cudaError_t punica::launch_prompt<__half>(punica::PromptParams const&, punica::LaunchConfig const&);
