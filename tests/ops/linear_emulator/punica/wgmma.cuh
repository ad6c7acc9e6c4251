// Stands in for csrc/include/punica/wgmma.cuh: a product is computed when somebody waits for it, from what is in shared memory then.
#pragma once

#include "punica/hopper.cuh"

namespace punica {

// Element k of a row of an operand whose rows are 128 bytes with swapped sixteenths.
template <typename T>
float operand_element(uint64_t operand, int row, int k) {
  uint32_t const address = static_cast<uint32_t>(operand << 4) + row * 128 + k * 2;
  T value;
  std::memcpy(&value, emulator::at(address ^ (address >> 7 & 7) << 4, 2), 2);
  return static_cast<float>(value);
}

template <typename T, size_t kCount>
void multiply_warpgroup(float (&d)[kCount], uint64_t a, uint64_t b) {
  float* const sums = d;
  emulator::self->products.back().push_back({[=] {
    int const lane = threadIdx.x % 32;
    int const first = threadIdx.x % 128 / 32 * 16 + lane / 4;
    for (int half = 0; half < 2; ++half) {
      float row[16];
      for (int k = 0; k < 16; ++k) row[k] = operand_element<T>(a, first + half * 8, k);
      for (int j = 0; j < static_cast<int>(kCount) / 4; ++j)
        for (int i = 0; i < 2; ++i)
          for (int k = 0; k < 16; ++k) sums[4 * j + 2 * half + i] += row[k] * operand_element<T>(b, 8 * j + lane % 4 * 2 + i, k);
    }
  }});
}

}  // namespace punica
