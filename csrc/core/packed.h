// Arithmetic on packs of 16-bit elements, two at a time. Each operation rounds once. The bits are
// those of a float operation whose result is rounded: where a float does not hold a product or a
// sum of two elements exactly, it is not near a tie. Torch-free.
#pragma once

#include <type_traits>

#include "core/convert.h"

namespace fused_op {

#ifdef __CUDACC__
// a·b + c.
__device__ __forceinline__ std::uint32_t multiply_add_pair(Float16, std::uint32_t a,
                                                           std::uint32_t b, std::uint32_t c) {
  std::uint32_t word;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(word) : "r"(a), "r"(b), "r"(c));
  return word;
}
__device__ __forceinline__ std::uint32_t multiply_add_pair(BFloat16, std::uint32_t a,
                                                           std::uint32_t b, std::uint32_t c) {
#if __CUDA_ARCH__ >= 800
  std::uint32_t word;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(word) : "r"(a), "r"(b), "r"(c));
  return word;
#else
  const auto low = [](std::uint32_t word) { return __uint_as_float(word << 16); };
  const auto high = [](std::uint32_t word) { return __uint_as_float(word & 0xffff0000u); };
  return rounded_pair(BFloat16{}, fmaf(low(a), low(b), low(c)), fmaf(high(a), high(b), high(c)));
#endif
}

template <typename T>
struct Pairs {
  static_assert(sizeof(T) == 2);
  static constexpr std::uint32_t kOne = std::is_same_v<T, Float16> ? 0x3c003c00u : 0x3f803f80u;
  static constexpr std::uint32_t kSigns = 0x80008000u;

  template <int N>
  __device__ __forceinline__ static Pack<T, N> product(const Pack<T, N>& a, const Pack<T, N>& b) {
    // Adding -0 changes no product, not even the sign of a zero.
    return by_words<N>(
        [&](int w) { return multiply_add_pair(T{}, a.words[w], b.words[w], kSigns); });
  }
  template <int N>
  __device__ __forceinline__ static Pack<T, N> sum(const Pack<T, N>& a, const Pack<T, N>& b) {
    return by_words<N>([&](int w) { return multiply_add_pair(T{}, b.words[w], kOne, a.words[w]); });
  }
  template <int N>
  __device__ __forceinline__ static Pack<T, N> difference(const Pack<T, N>& a,
                                                          const Pack<T, N>& b) {
    return by_words<N>(
        [&](int w) { return multiply_add_pair(T{}, b.words[w], kOne | kSigns, a.words[w]); });
  }

 private:
  template <int N, typename Word>
  __device__ __forceinline__ static Pack<T, N> by_words(const Word& word) {
    Pack<T, N> result;
#pragma unroll
    for (int w = 0; w < static_cast<int>(sizeof(result.words) / 4); ++w) {
      result.words[w] = word(w);
    }
    return result;
  }
};
#endif

}  // namespace fused_op
