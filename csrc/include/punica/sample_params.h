// Parameters of the sampling kernels. No torch here. The twin of punica_core/ops/sample.py.
//
// Dims: B rows, V vocabulary.
#pragma once

#include "punica/params.h"

namespace punica {

constexpr int kMaxVocab = 1 << 22;  // tokens whose weights still sum up in 63 bits

// How one row is sampled.
struct alignas(16) SampleRow {
  float temperature;  // 0: the largest logit
  int32_t top_k;      // 0: off
  double top_p;       // 1: off
  double point;       // where in the distribution the token lies, in [0, 1)
  int64_t least;      // smallest weight that min_p leaves; 0: off
};
static_assert(sizeof(SampleRow) == 32);

struct SampleParams {
  void const* logits;     // [B, V] of the kernel's dtype
  SampleRow const* rows;  // [B]; null: the largest logit of every row
  int64_t* token_ids;     // [B]
  bool* finite;           // [B]: neither NaN nor +inf among the row's logits
  int64_t logits_stride;
  int num_rows;
  int vocab_size;
};

template <typename T>
cudaError_t launch_sample(SampleParams const& params, LaunchConfig const& config);

}  // namespace punica
