// A pack: a few neighbouring elements of a row, as they lie in memory. This file has the reads and
// writes of packs and their conversion to and from accumulators for the CPU; for the GPU, these are
// in cuda/access.cuh and core/convert.h. Torch-free.
#pragma once

#include <cstddef>
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

// Reads and writes packs at any address. A pack begins at column `col` of a row of `width` columns.
// Elements past the end of the row are read as `absent` and not written.
struct ByteAccess {
  template <int N, typename T>
  FUSED_OP_HD static Pack<T, N> load(const T* row, std::int64_t col, std::int64_t width,
                                     float absent = 0) {
    if (col + N <= width) {
      Pack<T, N> pack;
      memcpy(pack.words, row + col, sizeof(pack.words));
      return pack;
    }
    T values[N];
    for (int j = 0; j < N; ++j) {
      values[j] = static_cast<T>(absent);
      if (col + j < width) {
        memcpy(&values[j], row + col + j, sizeof(T));
      }
    }
    return as_pack(values);
  }

  // Parameters that may be null, which means `absent` everywhere.
  template <int N, typename T>
  FUSED_OP_HD static Pack<T, N> load_or(const T* row, std::int64_t col, std::int64_t width,
                                        float absent) {
    return load<N>(row, col, row != nullptr ? width : 0, absent);
  }

  template <typename T, int N>
  FUSED_OP_HD static void store(T* row, std::int64_t col, std::int64_t width,
                                const Pack<T, N>& pack) {
    if (col < width) {
      const std::int64_t valid = width - col < N ? width - col : N;
      memcpy(row + col, pack.words, static_cast<std::size_t>(valid) * sizeof(T));
    }
  }
};

// Elements to accumulators, exactly.
template <typename T, int N>
FUSED_OP_HD void unpack(const Pack<T, N>& pack, Accumulator<T> (&values)[N]) {
  T elements[N];
  memcpy(elements, pack.words, sizeof(pack.words));
  for (int j = 0; j < N; ++j) {
    values[j] = static_cast<Accumulator<T>>(elements[j]);
  }
}

// Accumulators to elements. This rounds, once.
template <typename T, int N>
FUSED_OP_HD Pack<T, N> pack_from(const Accumulator<T> (&values)[N]) {
  T elements[N];
  for (int j = 0; j < N; ++j) {
    elements[j] = static_cast<T>(values[j]);
  }
  return as_pack(elements);
}

}  // namespace fused_op
