// The forward of rows no longer than a vector, where norm_forward_kernel has a lane for each: dense
// rows are one aligned span, and a thread has all rows of a few of its vectors. The same bits.
// H200, bf16, LayerNorm, us of 4194304 rows of 1, 2, 3 and 4 columns: 6 12 18 19; there 62 66
// 63 63. Included by launch_*.cu only; torch-free.
#pragma once

#include "core/norm_args.h"
#include "cuda/dependent_launch.cuh"
#include "cuda/forward.cuh"
#include "cuda/row_access.cuh"

namespace fused_op::cuda {

constexpr int kFlatThreads = 256;

// How a thread takes rows of kCols columns: a group of vectors that is a whole number of rows, and
// several such groups, kFlatThreads apart, where one vector is enough for a group.
template <typename T, int kCols>
struct FlatTile {
  static constexpr int N = kVector<T>;
  static constexpr bool kOneVector = N % kCols == 0;
  static constexpr int kVectors = kOneVector ? 1 : kCols;  // of a group
  static constexpr int kRows = kVectors * N / kCols;       // of a group
  static constexpr int kGroups = kRows == 8 || !kOneVector ? 1 : 2;
  // Zero leaves registers to the compiler: up to 64 for these. Bounds of one and of four or five
  // CTAs made them take more, or spill. For longer rows it stops at 128, and spills.
  static constexpr int kCtasPerSm = kOneVector || kCols == 3 ? 0 : 1;
  static constexpr int kCtaVectors = kFlatThreads * kVectors * kGroups;
  static constexpr int kCtaRows = kFlatThreads * kRows * kGroups;
};

template <typename A, int kCols>
struct ShortRow {
  A values[kCols];
};
template <typename A, int kCols>
__device__ __forceinline__ void unpack(const ShortRow<A, kCols>& row, A (&values)[kCols]) {
#pragma unroll
  for (int j = 0; j < kCols; ++j) {
    values[j] = row.values[j];
  }
}
// Moments of a row of equal values, none of which is so small that its square might vanish: its
// mean is exact. Of rows of two bfloat16 elements these are not rare: one in most warps.
template <typename A>
__device__ __forceinline__ bool is_constant(const Moments<A>& moments) {
  return moments.second == A(0) && fabs(moments.mean) >= A(0x1p-39);
}

template <typename Norm, typename T, typename A, int kCols>
__device__ __forceinline__ Moments<A> short_moments(const ShortRow<A, kCols> (&row)[1], A cols,
                                                    A scale, bool refined) {
  if constexpr (kCols == 1 && Norm::kCentered) {
    // Its own mean: rstd is the same for all, and taken once. (Of an infinite element, x - mean is
    // NaN.) H200, bf16, 4194304x1: 9.4 us so far, 5.6 so, where a copy takes 5.5.
    return {A(0) + row[0].values[0] * scale, A(0), A(0)};
  }
  return group_moments<Norm, VectorAccess, 1, 1, kCols, T>(row, kCols, cols, scale, refined,
                                                           [](A total) { return total; });
}

// Weight and bias of all columns.
template <typename W, typename A, int kCols>
struct ShortAffine {
  A weight[kCols];
  A bias[kCols];

  __device__ __forceinline__ explicit ShortAffine(const NormForwardArgs& args) {
    const auto* const weights = static_cast<const W*>(args.weight);
    const auto* const biases = static_cast<const W*>(args.bias);
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      weight[j] = weights != nullptr ? static_cast<A>(weights[j]) : A(1);
      bias[j] = biases != nullptr ? static_cast<A>(biases[j]) : A(0);
    }
  }
};

template <typename Norm, typename A, typename Affine, int kCols>
__device__ __forceinline__ void normalize(ShortRow<A, kCols>& row, const Affine& affine,
                                          const Normalizer<A>& normalizer) {
#pragma unroll
  for (int j = 0; j < kCols; ++j) {
    const A xhat = Norm::normalized(row.values[j], normalizer);
    row.values[j] = Norm::kCentered ? multiply_add(xhat, affine.weight[j], affine.bias[j])
                                    : xhat * affine.weight[j];
  }
}

// The rest of norm_forward_flat_kernel for a thread with rows that are not trusted(), as in
// norm_forward_kernel's finish_untrusted: takes these groups (a bit each) again from memory.
template <typename W, typename Norm, typename T, int kCols>
__device__ __forceinline__ void finish_untrusted_short(const NormForwardArgs& args,
                                                       unsigned groups) {
  using A = Accumulator<T>;
  using Tile = FlatTile<T, kCols>;
  const A cols = static_cast<A>(args.cols);
#pragma unroll 1
  for (int i = 0; i < Tile::kGroups * Tile::kRows; ++i) {
    const int group = i / Tile::kRows;
    const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * Tile::kCtaRows +
                             (group * kFlatThreads + static_cast<int>(threadIdx.x)) * Tile::kRows +
                             i % Tile::kRows;
    if ((groups >> group & 1) == 0 || row >= args.rows) {
      continue;
    }
    const T* const from = static_cast<const T*>(args.input.data) + row * kCols;
    T* const to = static_cast<T*>(args.output.data) + row * kCols;
    ShortRow<A, kCols> x[1];
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      x[0].values[j] = static_cast<A>(from[j]);
    }
    A scale = 1;
    Moments<A> moments = short_moments<Norm, T>(x, cols, scale, false);
    if (!trusted(moments, cols)) {
#pragma unroll 1
      for (int attempt = 0; attempt < 2 && (attempt == 0 || overflowed(moments)); ++attempt) {
        scale = attempt == 0 ? A(1) : Limits<A>::kScale;
        const WarpMoments<A> again{cols, short_moments<Norm, T>(x, cols, scale, true)};
        moments = append(WarpMoments<A>{}, again).moments;
      }
    }
    normalize<Norm>(x[0], ShortAffine<W, A, kCols>(args),
                    normalizer_of<Norm>(args, moments, scale, reciprocal(cols), row, true));
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      to[j] = static_cast<T>(x[0].values[j]);
    }
  }
}

// A vector of a span that ends after `span` elements.
template <typename T>
__device__ __forceinline__ Pack<T, kVector<T>> load_of_span(const T* elements, int first,
                                                            int span) {
  constexpr int N = kVector<T>;
  if (first + N <= span) {
    return VectorAccess::load<N>(elements, first, span);
  }
  T values[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    values[j] = first + j < span ? elements[first + j] : static_cast<T>(0.0f);
  }
  return as_pack(values);
}
template <typename T, int N>
__device__ __forceinline__ void store_to_span(T* elements, int first, int span,
                                              const Pack<T, N>& pack) {
  if (first + N <= span) {
    VectorAccess::store(elements, first, span, pack);
    return;
  }
  T values[N];
  memcpy(values, pack.words, sizeof(values));
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (first + j < span) {
      elements[first + j] = values[j];
    }
  }
}

// grid: enough CTAs for all rows.
template <typename W, typename Norm, typename T, int kCols>
__global__ void __launch_bounds__(kFlatThreads, FlatTile<T, kCols>::kCtasPerSm)
    norm_forward_flat_kernel(const __grid_constant__ NormForwardArgs args) {
  using A = Accumulator<T>;
  using Tile = FlatTile<T, kCols>;
  constexpr int N = Tile::N;
  constexpr int kVectors = Tile::kVectors;
  constexpr int kGroups = Tile::kGroups;
  const std::int64_t cta_row = static_cast<std::int64_t>(blockIdx.x) * Tile::kCtaRows;
  const int rows = static_cast<int>(min(args.rows - cta_row, std::int64_t{Tile::kCtaRows}));
  const int span = rows * kCols;
  const int thread = static_cast<int>(threadIdx.x);

  await_kernels_before();
  const T* const input = static_cast<const T*>(args.input.data) + cta_row * kCols;
  T* const output = static_cast<T*>(args.output.data) + cta_row * kCols;
  // The vectors that this thread loads and stores, kFlatThreads apart, are those of its groups, or
  // neighbours have to exchange them.
  Pack<T, N> packs[kGroups][kVectors];
#pragma unroll
  for (int i = 0; i < kGroups * kVectors; ++i) {
    packs[i / kVectors][i % kVectors] = load_of_span(input, (i * kFlatThreads + thread) * N, span);
  }
  const ShortAffine<W, A, kCols> affine(args);
  __shared__ Pack<T, N> exchanged[Tile::kOneVector ? 1 : Tile::kCtaVectors];
  if constexpr (!Tile::kOneVector) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      exchanged[i * kFlatThreads + thread] = packs[0][i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      packs[0][i] = exchanged[thread * kVectors + i];
    }
  }

  // Known to the compiler only where that helps: us at 4194304 rows of 2 and 3 columns, known or
  // not, 11.6 12.6, 19.4 17.8.
  const A cols = kCols <= 2 ? A(kCols) : static_cast<A>(args.cols);
  const A inverse_cols = reciprocal(cols);
  unsigned untrusted = 0;  // a bit a group
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int first_row = (group * kFlatThreads + thread) * Tile::kRows;
    ShortRow<A, kCols> row[Tile::kRows];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      A values[N];
      unpack(packs[group][i], values);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        row[(i * N + j) / kCols].values[(i * N + j) % kCols] = values[j];
      }
    }
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
      const ShortRow<A, kCols> one[1] = {row[i]};
      const Moments<A> moments = short_moments<Norm, T>(one, cols, A(1), false);
      const bool trust = trusted(moments, cols) || (kCols == 2 && is_constant(moments));
      untrusted |= trust ? 0 : 1u << group;
      normalize<Norm>(row[i], affine,
                      normalizer_of<Norm>(args, moments, A(1), inverse_cols,
                                          cta_row + first_row + i, first_row + i < rows));
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      A values[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        values[j] = row[(i * N + j) / kCols].values[(i * N + j) % kCols];
      }
      packs[group][i] = pack_from<T, N>(values);
    }
  }

  if constexpr (!Tile::kOneVector) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      exchanged[thread * kVectors + i] = packs[0][i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      packs[0][i] = exchanged[i * kFlatThreads + thread];
    }
  }
#pragma unroll
  for (int i = 0; i < kGroups * kVectors; ++i) {
    store_to_span(output, (i * kFlatThreads + thread) * N, span, packs[i / kVectors][i % kVectors]);
  }
  if constexpr (!Tile::kOneVector) {
    __syncthreads();  // what neighbours stored of this thread's rows is written once more
  }
  if (untrusted != 0) {
    finish_untrusted_short<W, Norm, T, kCols>(args, untrusted);
  }
}

}  // namespace fused_op::cuda
