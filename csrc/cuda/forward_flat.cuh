// Forward of short rows that lie one after another and of which most begin inside a vector. A CTA
// copies its rows as one span into shared memory and back, and a few lanes process each row there.
// The bits are those of forward_kernel with as many lanes. Compiled by nvcc and by NVRTC;
// torch-free.
#pragma once

#include "cuda/forward_rows.cuh"

namespace fused_op::cuda {

// A thread has a part of kRows rows of kCols columns: every kLanes-th pack of kPack elements.
template <int kPack_, int kLanes_, int kRows_, int kCols_>
struct FlatTile {
  static constexpr int kPack = kPack_;
  static constexpr int kLanes = kLanes_;
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  static constexpr int kStep = kLanes * kPack;
  static constexpr int kVectors = (kCols + kStep - 1) / kStep;
  static constexpr int kSideBySide = kFlatThreads / kLanes;  // rows
  static constexpr int kCtaRows = kSideBySide * kRows;
  // Vectors of 16 bytes that a thread copies, at most.
  template <typename T>
  static constexpr int kCopies =
      (kCtaRows * kCols + kFlatThreads * kVector<T> - 1) / (kFlatThreads * kVector<T>);
  using RowLane = Lane<kLanes, kStep, kCols / kStep, false>;
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

  __device__ __forceinline__ char* at(int row, int col) const {
    return reinterpret_cast<char*>(vectors) + (row * Tile::kCols + col) * int{sizeof(T)};
  }
  // The lane's pack i of a row.
  template <typename Lane>
  __device__ __forceinline__ Pack<T, N> load(int row, const Lane& lane, int i) const {
    Pack<T, N> pack;
    clear(pack);
#pragma unroll
    for (int k = 0; k < kBytes / kPiece; ++k) {
      if (lane.template valid<N>(i) > k * (kPiece / int{sizeof(T)})) {
        copy(reinterpret_cast<char*>(pack.words) + k * kPiece, at(row, lane.col(i)) + k * kPiece);
      }
    }
    return pack;
  }
  template <typename Lane>
  __device__ __forceinline__ void store(int row, const Lane& lane, int i,
                                        const Pack<T, N>& pack) const {
#pragma unroll
    for (int k = 0; k < kBytes / kPiece; ++k) {
      if (lane.template valid<N>(i) > k * (kPiece / int{sizeof(T)})) {
        copy(at(row, lane.col(i)) + k * kPiece,
             reinterpret_cast<const char*>(pack.words) + k * kPiece);
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
                                                    int first, A scale) {
  constexpr int N = Tile::kPack;
  WarpMoments<A> mine{};
#pragma unroll 1
  for (int i = 0; i < Tile::kVectors; ++i) {
    const Lane<Tile::kLanes, 0, 0, false> lane{first + i * Tile::kStep, Tile::kCols, true};
    const Pack<T, N> pack[1] = {span.load(row, lane, 0)};
    const A count = static_cast<A>(min(Tile::kCols - i * Tile::kStep, Tile::kStep));
    mine = append(
        mine, {count, moments_of_lanes<Norm, false, Tile::kLanes>(lane, pack, count, scale, true)});
  }
  return mine.moments;
}

// The same for a row that may overflow; `scale` becomes that of its elements. All lanes of a warp
// call it, because they take part in its sums.
template <typename Norm, typename Tile, typename T, typename A>
__device__ __forceinline__ Moments<A> careful_moments(const FlatSpan<Tile, T>& span, int row,
                                                      int first, A& scale) {
  const Moments<A> moments = moments_again<Norm>(span, row, first, A(1));
  const Moments<A> scaled = moments_again<Norm>(span, row, first, Limits<A>::kScale);
  const bool overflows = overflowed(moments);
  scale = overflows ? Limits<A>::kScale : A(1);
  return overflows ? scaled : moments;
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
  const int thread = static_cast<int>(threadIdx.x);
  const typename Tile::RowLane lane{thread % Tile::kLanes * N, Tile::kCols, true};
  await_kernels_before();
  source.read(static_cast<const Row*>(args.input.data) + cta_row * Tile::kCols, rows * Tile::kCols);
  typename Epilogue::template Parameters<N> parameters[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    parameters[i] = Epilogue::template load<Norm, typename Tile::Access, N>(
        args, lane.col(i), lane.template valid<N>(i));
  }
  __syncthreads();
  const A cols = static_cast<A>(Tile::kCols);
  const auto load = [&](int row, Pack<Row, N>(&packs)[kVectors]) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      packs[i] = source.load(row, lane, i);
    }
  };
  const auto finish = [&](int row, const Pack<Row, N>(&packs)[kVectors], Moments<A> moments,
                          A scale) {
    const Normalizer<A> normalizer = normalizer_of<Norm>(
        args, moments, scale, reciprocal(cols), cta_row + row, row < rows && lane.first == 0);
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
      target.store(row, lane, i, rounded<Y>(values));
    }
  };
  // No branch tests whether a row exists, so that the rows of a thread overlap. Rows past the last
  // one hold arbitrary values, and are stored only in shared memory.
  const auto row_of = [&](int r) { return r * Tile::kSideBySide + thread / Tile::kLanes; };
  unsigned untrusted = 0;  // one bit for each row
#pragma unroll
  for (int r = 0; r < Tile::kRows; ++r) {
    const int row = row_of(r);
    Pack<Row, N> packs[kVectors];
    load(row, packs);
    const Moments<A> moments =
        moments_of_lanes<Norm, Tile::kCols % N == 0, Tile::kLanes>(lane, packs, cols, A(1), false);
    if (trusted(moments, cols)) {
      finish(row, packs, moments, A(1));
    } else {
      untrusted |= 1u << r;
    }
  }
#pragma unroll 1
  for (int r = 0; r < Tile::kRows; ++r) {
    const bool is_untrusted = untrusted >> r & 1u;
    if (!__any_sync(kAllLanes, is_untrusted)) {
      continue;
    }
    const int row = row_of(r);
    Pack<Row, N> packs[kVectors];
    load(row, packs);
    A scale;
    const Moments<A> moments = careful_moments<Norm>(source, row, lane.first, scale);
    __syncwarp();  // all lanes have read what is overwritten now
    if (is_untrusted) {
      finish(row, packs, moments, scale);
    }
  }
  __syncthreads();
  target.write(static_cast<Y*>(args.output.data) + cta_row * Tile::kCols, rows * Tile::kCols);
}

}  // namespace fused_op::cuda
