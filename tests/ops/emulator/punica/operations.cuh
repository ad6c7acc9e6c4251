// What a warp does together and what a lane loads, for whatever runs the lanes: that brings `emulator::with_warp` and threadIdx.
#pragma once

inline void __syncwarp() { emulator::meet_warp(); }
inline float __uint_as_float(uint32_t word) { return std::bit_cast<float>(word); }
inline long long __ldcg(long long const* pointer) { return *pointer; }
inline int __ldcg(int const* pointer) { return *pointer; }

namespace punica {

enum class Source { kConstant, kActivation };

template <Source>
uint4 load16(void const* pointer) {
  uint4 out;
  std::memcpy(&out, pointer, sizeof(out));
  return out;
}

inline uint4 load16_now(void const* pointer) { return load16<Source::kConstant>(pointer); }

inline float4 load_floats_if(bool wanted, float const* pointer) {
  return wanted ? *reinterpret_cast<float4 const*>(pointer) : make_float4(0.f, 0.f, 0.f, 0.f);
}

template <Source>
uint16_t load2(void const* pointer) {
  uint16_t out;
  std::memcpy(&out, pointer, sizeof(out));
  return out;
}

template <typename T>
float element(uint32_t word, int half) {
  uint16_t const bits = static_cast<uint16_t>(word >> (16 * half));
  T value;
  std::memcpy(&value, &bits, sizeof(value));
  return static_cast<float>(value);
}

template <typename T>
void mma_16x8x16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  int const lane = threadIdx.x % emulator::kWarp;
  auto const sums = emulator::with_warp({a0, a1, a2, a3, b0, b1}, [&](auto const& lanes) {
    std::array<float, 4> out{d[0], d[1], d[2], d[3]};
    for (int i = 0; i < 4; ++i)
      for (int k = 0; k < 16; ++k) {
        auto const& a = lanes[lane / 4 * 4 + k % 8 / 2];
        auto const& b = lanes[(lane % 4 * 2 + i % 2) * 4 + k % 8 / 2];
        out[i] += element<T>(a[k / 8 * 2 + i / 2], k % 2) * element<T>(b[4 + k / 8], k % 2);
      }
    return out;
  });
  std::copy(sums.begin(), sums.end(), d);
}

inline void add(int* counter, int number) { *counter += number; }
inline int count(int* counter) { return (*counter)++; }
inline int count_in_order(int* counter) { return count(counter); }

inline unsigned warp_min(unsigned value) {
  return emulator::with_warp({value, 0, 0, 0, 0, 0}, [](auto const& lanes) {
    unsigned least = ~0u;
    for (auto const& words : lanes) least = std::min(least, words[0]);
    return least;
  });
}

inline float shuffle_xor(float value, int distance) {
  int const other = threadIdx.x % emulator::kWarp ^ distance;
  return emulator::with_warp({std::bit_cast<uint32_t>(value), 0, 0, 0, 0, 0},
                             [&](auto const& lanes) { return std::bit_cast<float>(lanes[other][0]); });
}

inline int shuffle(int value, int lane) {
  return emulator::with_warp({static_cast<uint32_t>(value), 0, 0, 0, 0, 0},
                             [&](auto const& lanes) { return static_cast<int>(lanes[lane][0]); });
}

inline uint32_t transposed_8x8(uint32_t pair) {
  int const row = threadIdx.x % emulator::kWarp / 4;
  int const column = threadIdx.x % 4 * 2;
  return emulator::with_warp({pair, 0, 0, 0, 0, 0}, [&](auto const& lanes) {
    auto const element = [&](int r, int c) { return lanes[r * 4 + c / 2][0] >> (c % 2 * 16) & 0xffffu; };
    return element(column, row) | element(column + 1, row) << 16;
  });
}

inline int quotient(int a, int b) { return a / b; }

inline float4 quad_sum(float4 value) {
  using std::bit_cast;
  std::array<uint32_t, 6> const words{bit_cast<uint32_t>(value.x), bit_cast<uint32_t>(value.y), bit_cast<uint32_t>(value.z),
                                      bit_cast<uint32_t>(value.w)};
  return emulator::with_warp(words, [](auto const& lanes) {
    auto const* const quad = &lanes[threadIdx.x % emulator::kWarp / 4 * 4];
    std::array<float, 4> sum;
    for (int i = 0; i < 4; ++i)
      sum[i] = (bit_cast<float>(quad[0][i]) + bit_cast<float>(quad[1][i])) + (bit_cast<float>(quad[2][i]) + bit_cast<float>(quad[3][i]));
    return make_float4(sum[0], sum[1], sum[2], sum[3]);
  });
}

inline void prefetch(void const* pointer, int bytes) {
  auto const* const bytes_asked = static_cast<unsigned char const*>(pointer);
  for (int i = 0; i < bytes; ++i) emulator::prefetched += bytes_asked[i];
}

inline int4 load_metadata(int4 const* pointer) { return *pointer; }

}  // namespace punica
