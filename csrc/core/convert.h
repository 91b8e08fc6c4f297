// Conversion of packs between any element type and the precision of the arithmetic. On the GPU,
// 16-bit elements convert in pairs; one at a time takes twice the instructions. Torch-free.
#pragma once

#include "core/pack.h"

namespace fused_op {

// Exact.
template <typename T, int N, typename A>
FUSED_OP_HD void to_values(const Pack<T, N>& pack, A (&values)[N]) {
  T elements[N];
  memcpy(elements, pack.words, sizeof(elements));
  for (int j = 0; j < N; ++j) {
    values[j] = static_cast<A>(elements[j]);
  }
}

#ifdef __CUDACC__
template <int N>
__device__ __forceinline__ void to_values(const Pack<BFloat16, N>& pack, float (&values)[N]) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const std::uint32_t word = pack.words[j / 2];
    values[j] = __uint_as_float(j % 2 == 0 ? word << 16 : word & 0xffff0000u);
  }
}
template <int N>
__device__ __forceinline__ void to_values(const Pack<Float16, N>& pack, float (&values)[N]) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const auto half = static_cast<std::uint16_t>(pack.words[j / 2] >> (j % 2 * 16));
    asm("cvt.f32.f16 %0, %1;" : "=f"(values[j]) : "h"(half));
  }
}

template <typename T, int N>
  requires(sizeof(T) == 2)
__device__ __forceinline__ void to_values(const Pack<T, N>& pack, double (&values)[N]) {
  float single[N];
  to_values(pack, single);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    values[j] = single[j];
  }
}

// Two values as 16-bit elements, the first in the lower half of the word.
__device__ __forceinline__ std::uint32_t rounded_pair(Float16, float low, float high) {
  std::uint32_t word;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#else
  asm("{\n"
      "  .reg .b16 low, high;\n"
      "  cvt.rn.f16.f32 low, %2;\n"
      "  cvt.rn.f16.f32 high, %1;\n"
      "  mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(word)
      : "f"(high), "f"(low));
#endif
  return word;
}
__device__ __forceinline__ std::uint32_t rounded_pair(BFloat16, float low, float high) {
#if __CUDA_ARCH__ >= 800
  std::uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
  const auto bits = [](float value) {
    const std::uint32_t exact = __float_as_uint(value);
    return value != value ? 0x7fffu : (exact + 0x7fffu + (exact >> 16 & 1u)) >> 16;
  };
  return bits(low) | bits(high) << 16;
#endif
}

// This rounds, once.
template <typename T, typename A, int N>
__device__ __forceinline__ Pack<T, N> rounded(const A (&values)[N]) {
  Pack<T, N> pack;
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int j = 0; j < N; j += 2) {
      pack.words[j / 2] = rounded_pair(T{}, values[j], j + 1 < N ? values[j + 1] : 0.0f);
    }
  } else {
    T elements[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      elements[j] = static_cast<T>(values[j]);
    }
    memcpy(pack.words, elements, sizeof(elements));
  }
  return pack;
}
#endif

}  // namespace fused_op
