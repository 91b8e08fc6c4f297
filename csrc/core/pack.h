// A pack: a few neighbouring elements of a row, as they lie in memory. They are read
// and written by cuda/access.cuh and converted by core/convert.h. Torch-free.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define FUSED_OP_HD __host__ __device__ __forceinline__
#else
#define FUSED_OP_HD inline
#endif

namespace fused_op {

// Elements of 16 bits, as they lie in memory. Arithmetic uses float.
struct Float16 {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

// Sums and formulas of an element type T are computed in Accumulator<T>.
template <typename T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <typename T>
using Accumulator = typename AccumulatorOf<T>::type;

constexpr int kVectorBytes = 16;  // the widest load of one GPU thread
constexpr int kWarpSize = 32;     // GPU threads
template <typename T>
constexpr int kVector = kVectorBytes / static_cast<int>(sizeof(T));

// Held as 32-bit words: where branches meet, the GPU's compiler takes packs of 16-bit values apart
// and puts them together again. float parameters beside 16-bit elements make packs of 32 bytes, two
// vector instructions. A single 16-bit element is the lower half of its word.
template <typename T, int N>
struct alignas(sizeof(T) * N < 4              ? 4
               : sizeof(T) * N < kVectorBytes ? sizeof(T) * N
                                              : kVectorBytes) Pack {
  std::uint32_t words[(sizeof(T) * N + 3) / 4];
};

template <typename T, int N>
FUSED_OP_HD Pack<T, N> as_pack(const T (&values)[N]) {
  Pack<T, N> pack;
  memcpy(pack.words, values, sizeof(pack.words));
  return pack;
}

}  // namespace fused_op
