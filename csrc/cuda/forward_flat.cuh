// Forward of short rows that lie one after another. A CTA copies its rows as one span into shared
// memory and back, whole vectors at a time, and one thread or a few process each row there. They
// stand in for the lanes that forward_kernel would give the row, so the bits are the same. Compiled
// by nvcc and by NVRTC; torch-free.
#pragma once

#include "cuda/forward_rows.cuh"

namespace fused_op::cuda {

// A row of kCols columns has kLanes lanes, each with every kLanes-th pack of kPack elements. Each
// of its kThreads threads has the packs of every kThreads-th lane, and of kRows rows in turn.
template <int kPack_, int kLanes_, int kThreads_, int kRows_, int kCtasPerSm_, int kCols_>
struct FlatTile {
  static constexpr int kPack = kPack_;
  static constexpr int kLanes = kLanes_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kRows = kRows_;
  static constexpr int kCtasPerSm = kCtasPerSm_;
  static constexpr int kCols = kCols_;
  static constexpr int kOwnLanes = kLanes / kThreads;  // of a thread
  static constexpr int kStep = kLanes * kPack;
  static constexpr int kVectors = (kCols + kStep - 1) / kStep;  // packs of a lane
  static constexpr int kWarpRows = kWarpSize / kThreads;
  static constexpr int kWarpTurns = kFlatThreads / kWarpSize * kRows;  // of all warps
  static constexpr int kCtaRows = kWarpTurns * kWarpRows;
  // Vectors of 16 bytes that a thread copies, at most.
  template <typename T>
  static constexpr int kCopies =
      (kCtaRows * kCols + kFlatThreads * kVector<T> - 1) / (kFlatThreads * kVector<T>);
  using RowLane = Lane<kLanes, kStep, kCols / kStep, false>;
  using Access = std::conditional_t<kCols % kPack == 0, Vectors, Words>;  // for parameters

  // The thread's row in the CTA, in its turn `turn`. The rows that a warp has at once are so far
  // apart that they begin in different banks of shared memory: neighbours at 63 columns of two
  // bytes, with eight threads each, would share eight banks.
  template <typename T>
  __device__ __forceinline__ static int row(int turn) {
    constexpr int kBytes = kCols * static_cast<int>(sizeof(T));
    constexpr int kPieces = kBytes & -kBytes;  // of so many bytes a row is an odd number
    constexpr int kAccess = kCols % kPack == 0 ? kPack * static_cast<int>(sizeof(T)) : 4;
    constexpr int kWanted = kThreads * kAccess / kPieces;
    constexpr int kApart = kWanted < 1 ? 1 : kWanted < kWarpTurns ? kWanted : kWarpTurns;
    static_assert(kWarpTurns % kApart == 0, "each row of the CTA is some warp's");
    const int thread = static_cast<int>(threadIdx.x);
    const int warp_turn = turn * (kFlatThreads / kWarpSize) + thread / kWarpSize;
    const int in_warp = thread % kWarpSize / kThreads;
    return warp_turn / kApart * (kApart * kWarpRows) + warp_turn % kApart + in_warp * kApart;
  }
  // The thread's lane `own`.
  __device__ __forceinline__ static RowLane lane(int own) {
    const int number = static_cast<int>(threadIdx.x) % kThreads + own * kThreads;
    return {number * kPack, kCols, true};
  }
  // Calls visit(own, i, lane) for each pack i of each lane of the thread.
  template <typename Visit>
  __device__ __forceinline__ static void each_pack(Visit&& visit) {
#pragma unroll
    for (int own = 0; own < kOwnLanes; ++own) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        visit(own, i, lane(own));
      }
    }
  }
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

// The packs of a row that a thread has, kCount of each lane.
template <typename Tile, typename T, int kCount>
using OwnPacks = Pack<T, Tile::kPack>[Tile::kOwnLanes][kCount];

// The moments of `count` elements of a row, of which each thread has `packs`: as moments_of_lanes()
// of so many lanes finds them, to the bit. lane(i) is a thread's lane i.
template <typename Norm, bool kWhole, typename Tile, typename T, int kCount, typename A,
          typename LaneOf>
__device__ __forceinline__ Moments<A> moments_of_threads(LaneOf&& lane,
                                                         const OwnPacks<Tile, T, kCount>& packs,
                                                         A count, A scale, bool refined) {
  return moments_from<Norm, T>(lane, count, refined, [&](const auto& valid, A from, auto&& add) {
    A sums[Tile::kOwnLanes];
#pragma unroll
    for (int own = 0; own < Tile::kOwnLanes; ++own) {
      sums[own] = sum_deviations<kWhole>(valid(own), packs[own], scale, from, add);
    }
#pragma unroll
    for (int half = Tile::kOwnLanes / 2; half > 0; half /= 2) {  // as lane_sum() would
#pragma unroll
      for (int own = 0; own < half; ++own) {
        sums[own] += sums[own + half];
      }
    }
    return lane_sum<Tile::kThreads>(sums[0]);
  });
}

// Computes the moments of a row again, pack by pack, because they were not trusted(). See
// Rescue::moments().
template <typename Norm, typename Tile, typename T, typename A>
__device__ __forceinline__ Moments<A> moments_again(const FlatSpan<Tile, T>& span, int row,
                                                    A scale) {
  WarpMoments<A> mine{};
#pragma unroll 1
  for (int i = 0; i < Tile::kVectors; ++i) {
    const auto lane = [&](int own) {
      const int first = Tile::lane(own).col(i);
      return Lane<Tile::kLanes, 0, 0, false>{first, Tile::kCols, true};
    };
    OwnPacks<Tile, T, 1> packs;
#pragma unroll
    for (int own = 0; own < Tile::kOwnLanes; ++own) {
      packs[own][0] = span.load(row, lane(own), 0);
    }
    const A count = static_cast<A>(min(Tile::kCols - i * Tile::kStep, Tile::kStep));
    mine = append(mine,
                  {count, moments_of_threads<Norm, false, Tile>(lane, packs, count, scale, true)});
  }
  return mine.moments;
}

// The same for a row that may overflow; `scale` becomes that of its elements. All lanes of a warp
// call it, because they take part in its sums.
template <typename Norm, typename Tile, typename T, typename A>
__device__ __forceinline__ Moments<A> careful_moments(const FlatSpan<Tile, T>& span, int row,
                                                      A& scale) {
  const Moments<A> moments = moments_again<Norm>(span, row, A(1));
  const Moments<A> scaled = moments_again<Norm>(span, row, Limits<A>::kScale);
  const bool overflows = overflowed(moments);
  scale = overflows ? Limits<A>::kScale : A(1);
  return overflows ? scaled : moments;
}

// Computes the moments of a row of which each thread has `packs`. Returns whether they are right;
// otherwise the row is taken again.
template <typename Norm, typename Tile, typename T, typename A>
__device__ __forceinline__ bool flat_moments(const OwnPacks<Tile, T, Tile::kVectors>& packs,
                                             Moments<A>& moments) {
  constexpr A kCols = Tile::kCols;
  if constexpr (Tile::kCols == 1 && Norm::kCentered) {
    // The element is its own mean, unless it is not finite. That rstd is the same for all rows, the
    // compiler can see: otherwise 4194304 rows of bf16 took 9.8 us, and a copy 5.5 (H200).
    A value[1];
    to_values(packs[0][0], value);
    moments = {A(0) + value[0], A(0), A(0)};  // 0 instead of -0
    return value[0] - value[0] == A(0);
  } else {
    constexpr bool kWhole = Tile::kCols % Tile::kPack == 0;
    moments = moments_of_threads<Norm, kWhole, Tile>(Tile::lane, packs, kCols, A(1), false);
    // Two elements that are equal have an exact mean. Of 16-bit elements most warps have such a
    // row. Where the mean is not tiny, no square of a deviation vanishes.
    const bool equal = moments.second == A(0) && fabs(moments.mean) >= A(0x1p-39);
    return trusted(moments, kCols) || (Tile::kCols == 2 && equal);
  }
}

// grid: enough CTAs for all rows.
template <typename Op, typename Tile>
__global__ void __launch_bounds__(kFlatThreads, Tile::kCtasPerSm)
    forward_flat_kernel(const __grid_constant__ NormForwardArgs args) {
  using Norm = typename Op::Norm;
  using Row = typename Op::Source::Row;
  using Epilogue = typename Op::Epilogue;
  using Y = typename Epilogue::Output;
  using A = Accumulator<Row>;
  constexpr int N = Tile::kPack;
  constexpr int kVectors = Tile::kVectors;
  constexpr int kOwnLanes = Tile::kOwnLanes;
  constexpr int kOwnBytes = Tile::kCols * int{sizeof(Row)} / Tile::kThreads;
  constexpr int kOverlap = kOwnBytes < 32 ? 32 / kOwnBytes : 1;  // rows of a thread at once
  static_assert(sizeof(Y) == sizeof(Row));  // the output takes the input's place
  static_assert(std::is_same_v<typename Op::Args, NormForwardArgs>, "nothing beside the row");

  __shared__ uint4 shared[Tile::kCtaRows * Tile::kCols / kVector<Row>];
  const FlatSpan<Tile, Row> source{shared};
  const FlatSpan<Tile, Y> target{shared};
  const std::int64_t cta_row = static_cast<std::int64_t>(blockIdx.x) * Tile::kCtaRows;
  const int rows = static_cast<int>(min(args.rows - cta_row, std::int64_t{Tile::kCtaRows}));
  await_kernels_before();
  source.read(static_cast<const Row*>(args.input.data) + cta_row * Tile::kCols, rows * Tile::kCols);
  typename Epilogue::template Parameters<N> parameters[kOwnLanes][kVectors];
  Tile::each_pack([&](int own, int i, const auto& lane) {
    parameters[own][i] = Epilogue::template load<Norm, typename Tile::Access, N>(
        args, lane.col(i), lane.template valid<N>(i));
  });
  __syncthreads();
  const A cols = static_cast<A>(Tile::kCols);
  const auto load = [&](int row, OwnPacks<Tile, Row, kVectors>& packs) {
    Tile::each_pack(
        [&](int own, int i, const auto& lane) { packs[own][i] = source.load(row, lane, i); });
  };
  const auto finish = [&](int row, const OwnPacks<Tile, Row, kVectors>& packs, Moments<A> moments,
                          A scale) {
    const bool saves = row < rows && static_cast<int>(threadIdx.x) % Tile::kThreads == 0;
    const Normalizer<A> normalizer =
        normalizer_of<Norm>(args, moments, scale, reciprocal(cols), cta_row + row, saves);
    Tile::each_pack([&](int own, int i, const auto& lane) {
      Epilogue epilogue(args, cta_row + row, lane);
      const typename Epilogue::template Beside<N, kVectors> nothing{};
      A values[N];
      to_values(packs[own][i], values);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        values[j] = Norm::normalized(values[j], normalizer);
      }
      epilogue.template apply<Norm>(parameters[own][i], nothing, i, values);
      target.store(row, lane, i, rounded<Y>(values));
    });
  };
  // Rows past the last one hold arbitrary values, and are stored only in shared memory. Taken a
  // second time, they made 63 columns take 10.2 us at 16897 rows and 5.8 us at 33792 (bf16, H200).
  unsigned untrusted = 0;  // one bit for each turn
#pragma unroll kOverlap
  for (int turn = 0; turn < Tile::kRows; ++turn) {
    const int row = Tile::template row<Row>(turn);
    OwnPacks<Tile, Row, kVectors> packs;
    load(row, packs);
    Moments<A> moments;
    const bool trust = flat_moments<Norm, Tile>(packs, moments) || row >= rows;
    // A branch would keep the compiler from computing the rstd of single elements once. What is not
    // finite is NaN when it is read again.
    constexpr bool kSingle = Tile::kCols == 1 && Norm::kCentered;
    if (kSingle || trust) {
      finish(row, packs, moments, A(1));
    }
    untrusted |= (trust ? 0u : 1u) << turn;
  }
#pragma unroll 1
  for (int turn = 0; turn < Tile::kRows && __any_sync(kAllLanes, untrusted >> turn != 0); ++turn) {
    const int row = Tile::template row<Row>(turn);
    OwnPacks<Tile, Row, kVectors> packs;
    load(row, packs);
    A scale;
    const Moments<A> moments = careful_moments<Norm>(source, row, scale);
    __syncwarp();  // all lanes have read what is overwritten now
    if (untrusted >> turn & 1u) {
      finish(row, packs, moments, scale);
    }
  }
  __syncthreads();
  target.write(static_cast<Y*>(args.output.data) + cta_row * Tile::kCols, rows * Tile::kCols);
}

}  // namespace fused_op::cuda
