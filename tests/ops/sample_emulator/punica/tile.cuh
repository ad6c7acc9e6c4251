// What the sampling kernels use of csrc/include/punica/tile.cuh, without PTX.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "punica/cluster.cuh"

namespace punica {

template <typename T>
struct Convert {
  static float to_float(T value) { return static_cast<float>(value); }
  static float low(uint32_t word) { return to_float(std::bit_cast<T>(static_cast<uint16_t>(word))); }
  static float high(uint32_t word) { return to_float(std::bit_cast<T>(static_cast<uint16_t>(word >> 16))); }
};

inline int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace punica
