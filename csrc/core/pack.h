// A few neighbouring elements of a row, as they lie in memory, and their way to and from
// accumulator precision. How packs are read and written is an access policy: ByteAccess here takes
// any address (the CPU's only one), cuda/row_access.cuh has the GPU's. Torch-free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __CUDACC__
#ifndef __CUDACC_RTC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif
#define FUSED_OP_HD __host__ __device__ __forceinline__
#else
#define FUSED_OP_HD inline
#endif

namespace fused_op {

// Elements of 16 bits as they lie in memory. Arithmetic is done in float.
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
template <typename T>
constexpr int kVector = kVectorBytes / static_cast<int>(sizeof(T));

// Held as 32-bit words, as they arrive: a pack of 16-bit values that two branches fill would be
// taken apart and put together again at every turn. Words, and an access policy in place of those
// branches, took the forward of 131072x1024 bf16 from 194 to 130 us (H200). float parameters beside
// 16-bit elements make packs of 32 bytes: two vector instructions.
// A single 16-bit element is the lower half of its word.
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

// Access policies have load, clip and store_row: a pack begins at column `col` of a row `width`
// columns wide. Elements past the row's end load as anything until clip() makes them zero (the
// GPU's clip_to() another value), and are not stored. store_row takes several packs, each `kLanes`
// packs after the one before.
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

  template <typename T, int N, typename Col>
  FUSED_OP_HD static void clip(Col, Pack<T, N>&) {}  // they loaded as zero

  // Parameters that may be absent: null means `absent` everywhere.
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
  template <int kLanes, typename T, int N, int kVectors>
  FUSED_OP_HD static void store_row(T* row, std::int64_t col, std::int64_t width,
                                    const Pack<T, N> (&packs)[kVectors]) {
    for (int i = 0; i < kVectors; ++i) {
      store(row, col + i * kLanes * N, width, packs[i]);
    }
  }
};

// Elements to accumulator precision, exactly.
template <typename T, int N>
FUSED_OP_HD void unpack(const Pack<T, N>& pack, Accumulator<T> (&values)[N]) {
  T elements[N];
  memcpy(elements, pack.words, sizeof(pack.words));
  for (int j = 0; j < N; ++j) {
    values[j] = static_cast<Accumulator<T>>(elements[j]);
  }
}

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)
// Two 16-bit elements in one instruction.
template <typename T>
FUSED_OP_HD std::uint32_t word_from(float low, float high) {
  std::uint32_t word;
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    memcpy(&word, &pair, sizeof(word));
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    memcpy(&word, &pair, sizeof(word));
  }
  return word;
}
#endif

// Back to elements: the one rounding.
template <typename T, int N>
FUSED_OP_HD Pack<T, N> pack_from(const Accumulator<T> (&values)[N]) {
#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)
  if constexpr (sizeof(T) == 2) {
    Pack<T, N> pack;
    for (int j = 0; j < N / 2; ++j) {
      pack.words[j] = word_from<T>(values[2 * j], values[2 * j + 1]);
    }
    return pack;
  } else
#endif
  {
    T elements[N];
    for (int j = 0; j < N; ++j) {
      elements[j] = static_cast<T>(values[j]);
    }
    return as_pack(elements);
  }
}

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)
// Pairs of 16-bit elements convert in one or two instructions on a 32-bit word; one element at a
// time costs about twice the instructions, which bounds a kernel at this memory speed.
template <int N>
FUSED_OP_HD void unpack(const Pack<__nv_bfloat16, N>& pack, float (&values)[N]) {
  for (int j = 0; j < N / 2; ++j) {
    const std::uint32_t low = pack.words[j] << 16;
    const std::uint32_t high = pack.words[j] & 0xffff0000u;
    memcpy(&values[2 * j], &low, sizeof(float));
    memcpy(&values[2 * j + 1], &high, sizeof(float));
  }
}
template <int N>
FUSED_OP_HD void unpack(const Pack<__half, N>& pack, float (&values)[N]) {
  for (int j = 0; j < N / 2; ++j) {
    __half2 pair;
    memcpy(&pair, &pack.words[j], sizeof(pair));
    const float2 both = __half22float2(pair);
    values[2 * j] = both.x;
    values[2 * j + 1] = both.y;
  }
}
#endif

}  // namespace fused_op
