// Forward of rows that are no longer than a vector and lie one after another. A CTA copies its rows
// as one span into shared memory and back, and each thread processes whole rows. The bits are those
// of forward_kernel with one lane a row. Compiled by nvcc and by NVRTC; torch-free.
#pragma once

#include "cuda/forward_rows.cuh"

namespace fused_op::cuda {

// A thread has kRows rows of kCols columns, in packs of kPack.
template <int kPack_, int kRows_, int kCols_>
struct FlatTile {
  static constexpr int kPack = kPack_;
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  static constexpr int kVectors = (kCols + kPack - 1) / kPack;
  static constexpr int kCtaRows = kFlatThreads * kRows;
  // Vectors of 16 bytes that a thread copies, at most.
  template <typename T>
  static constexpr int kCopies = (kRows * kCols + kVector<T> - 1) / kVector<T>;
  using RowLane = Lane<1, kPack, kCols / kPack, false>;
  using Access = std::conditional_t<kCols % kPack == 0, Vectors, Words>;  // for parameters
};

// The rows of a CTA in shared memory.
template <typename Tile, typename T>
struct FlatSpan {
  static constexpr int N = Tile::kPack;
  static constexpr int kBytes = N * static_cast<int>(sizeof(T));
  // Rows of an odd number of 16-bit elements may begin in the middle of a word.
  static constexpr int kPiece = Tile::kCols % N == 0 ? kBytes : static_cast<int>(sizeof(T));

  uint4* vectors;

  __device__ __forceinline__ char* at(int row, int i) const {
    return reinterpret_cast<char*>(vectors) + (row * Tile::kCols + i * N) * int{sizeof(T)};
  }
  __device__ __forceinline__ Pack<T, N> load(int row, int i) const {
    Pack<T, N> pack;
    clear(pack);
#pragma unroll
    for (int k = 0; k < kBytes / kPiece; ++k) {
      if (i * N + k * (kPiece / int{sizeof(T)}) < Tile::kCols) {
        copy(reinterpret_cast<char*>(pack.words) + k * kPiece, at(row, i) + k * kPiece);
      }
    }
    return pack;
  }
  __device__ __forceinline__ void store(int row, int i, const Pack<T, N>& pack) const {
#pragma unroll
    for (int k = 0; k < kBytes / kPiece; ++k) {
      if (i * N + k * (kPiece / int{sizeof(T)}) < Tile::kCols) {
        copy(at(row, i) + k * kPiece, reinterpret_cast<const char*>(pack.words) + k * kPiece);
      }
    }
  }
  // Copies `span` elements of global memory, which begin there at a multiple of 16 bytes. All
  // threads of the CTA take part.
  __device__ __forceinline__ void read(const T* from, int span) const {
    constexpr int kElements = kVector<T>;
    uint4 words[Tile::template kCopies<T>];
#pragma unroll
    for (int i = 0; i < Tile::template kCopies<T>; ++i) {
      const int first = (i * kFlatThreads + static_cast<int>(threadIdx.x)) * kElements;
      load_if<4>(first + kElements <= span, from + first,
                 reinterpret_cast<std::uint32_t*>(&words[i]));
    }
#pragma unroll
    for (int i = 0; i < Tile::template kCopies<T>; ++i) {
      const int vector = i * kFlatThreads + static_cast<int>(threadIdx.x);
      if ((vector + 1) * kElements <= span) {
        vectors[vector] = words[i];
      }
    }
    const int rest = span / kElements * kElements + static_cast<int>(threadIdx.x);
    if (rest < span) {
      reinterpret_cast<T*>(vectors)[rest] = from[rest];
    }
  }
  __device__ __forceinline__ void write(T* to, int span) const {
    constexpr int kElements = kVector<T>;
#pragma unroll
    for (int i = 0; i < Tile::template kCopies<T>; ++i) {
      const int vector = i * kFlatThreads + static_cast<int>(threadIdx.x);
      if ((vector + 1) * kElements <= span) {
        reinterpret_cast<uint4*>(to)[vector] = vectors[vector];
      }
    }
    const int rest = span / kElements * kElements + static_cast<int>(threadIdx.x);
    if (rest < span) {
      to[rest] = reinterpret_cast<const T*>(vectors)[rest];
    }
  }

 private:
  __device__ __forceinline__ static void copy(char* to, const char* from) {
    if constexpr (kPiece == 2) {
      *reinterpret_cast<std::uint16_t*>(to) = *reinterpret_cast<const std::uint16_t*>(from);
    } else if constexpr (kPiece == 4) {
      *reinterpret_cast<std::uint32_t*>(to) = *reinterpret_cast<const std::uint32_t*>(from);
    } else {
      memcpy(to, __builtin_assume_aligned(from, kPiece), kPiece);
    }
  }
};

// Computes the moments of a row again, pack by pack, because they were not trusted(). See
// Rescue::moments().
template <typename Norm, typename Tile, typename T, typename A>
__device__ __forceinline__ Moments<A> moments_again(const FlatSpan<Tile, T>& span, int row,
                                                    A scale) {
  constexpr int N = Tile::kPack;
  WarpMoments<A> mine{};
#pragma unroll 1
  for (int i = 0; i < Tile::kVectors; ++i) {
    const Pack<T, N> pack[1] = {span.load(row, i)};
    const int count = min(Tile::kCols - i * N, N);
    const Lane<1, 0, 0, false> lane{0, count, true};
    mine = append(
        mine, {static_cast<A>(count),
               moments_of_lanes<Norm, false, 1>(lane, pack, static_cast<A>(count), scale, true)});
  }
  return mine.moments;
}

// grid: enough CTAs for all rows.
template <typename Op, typename Tile>
__global__ void __launch_bounds__(kFlatThreads)
    forward_flat_kernel(const __grid_constant__ NormForwardArgs args) {
  using Norm = typename Op::Norm;
  using Row = typename Op::Source::Row;
  using Epilogue = typename Op::Epilogue;
  using Y = typename Epilogue::Output;
  using A = Accumulator<Row>;
  constexpr int N = Tile::kPack;
  constexpr int kVectors = Tile::kVectors;
  static_assert(sizeof(Y) == sizeof(Row));  // the output takes the input's place
  static_assert(std::is_same_v<typename Op::Args, NormForwardArgs>, "nothing beside the row");

  __shared__ uint4 shared[Tile::kCtaRows * Tile::kCols / kVector<Row>];
  const FlatSpan<Tile, Row> source{shared};
  const FlatSpan<Tile, Y> target{shared};
  const std::int64_t cta_row = static_cast<std::int64_t>(blockIdx.x) * Tile::kCtaRows;
  const int rows = static_cast<int>(min(args.rows - cta_row, std::int64_t{Tile::kCtaRows}));
  const typename Tile::RowLane lane{0, Tile::kCols, true};
  await_kernels_before();
  source.read(static_cast<const Row*>(args.input.data) + cta_row * Tile::kCols, rows * Tile::kCols);
  typename Epilogue::template Parameters<N> parameters[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    parameters[i] = Epilogue::template load<Norm, typename Tile::Access, N>(
        args, i * N, lane.template valid<N>(i));
  }
  __syncthreads();
  const A cols = static_cast<A>(Tile::kCols);
  const auto load = [&](int row, Pack<Row, N>(&packs)[kVectors]) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      packs[i] = source.load(row, i);
    }
  };
  const auto finish = [&](int row, const Pack<Row, N>(&packs)[kVectors], Moments<A> moments,
                          A scale) {
    const Normalizer<A> normalizer =
        normalizer_of<Norm>(args, moments, scale, reciprocal(cols), cta_row + row, row < rows);
    Epilogue epilogue(args, cta_row + row, lane);
    const typename Epilogue::template Beside<N, kVectors> nothing{};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      A values[N];
      to_values(packs[i], values);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        values[j] = Norm::normalized(values[j], normalizer);
      }
      epilogue.template apply<Norm>(parameters[i], nothing, i, values);
      target.store(row, i, rounded<Y>(values));
    }
  };
  // No branch tests whether a row exists, so that the rows of a thread overlap. Rows past the last
  // one hold arbitrary values, and are stored only in shared memory.
  unsigned untrusted = 0;  // one bit for each row
#pragma unroll
  for (int r = 0; r < Tile::kRows; ++r) {
    const int row = r * kFlatThreads + static_cast<int>(threadIdx.x);
    Pack<Row, N> packs[kVectors];
    load(row, packs);
    const Moments<A> moments =
        moments_of_lanes<Norm, Tile::kCols % N == 0, 1>(lane, packs, cols, A(1), false);
    if (trusted(moments, cols)) {
      finish(row, packs, moments, A(1));
    } else {
      untrusted |= 1u << r;
    }
  }
#pragma unroll 1
  for (; untrusted != 0; untrusted &= untrusted - 1) {
    const int row =
        (__ffs(static_cast<int>(untrusted)) - 1) * kFlatThreads + static_cast<int>(threadIdx.x);
    Pack<Row, N> packs[kVectors];
    load(row, packs);
    A scale = 1;
    Moments<A> moments = moments_again<Norm>(source, row, scale);
    if (overflowed(moments)) {
      scale = Limits<A>::kScale;
      moments = moments_again<Norm>(source, row, scale);
    }
    finish(row, packs, moments, scale);
  }
  __syncthreads();
  target.write(static_cast<Y*>(args.output.data) + cta_row * Tile::kCols, rows * Tile::kCols);
}

}  // namespace fused_op::cuda
