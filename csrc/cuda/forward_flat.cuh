// Forward of short rows that lie one after another. A CTA copies its rows as one span into shared
// memory and back, whole vectors at a time, and one thread or a few process each row there. They
// stand in for the lanes that forward_kernel would give the row, so the bits are the same. Rows of
// which some fill a vector need no shared memory. Compiled by nvcc and by NVRTC; torch-free.
#pragma once

#include "cuda/flat_span.cuh"
#include "cuda/forward_rows.cuh"

namespace fused_op::cuda {

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

// What the threads of a CTA do with its rows.
template <typename Op, typename Tile>
class FlatRows {
  using Norm = typename Op::Norm;
  using Epilogue = typename Op::Epilogue;
  static constexpr int N = Tile::kPack;
  static constexpr int kVectors = Tile::kVectors;
  // Whether a row is stored even if its moments are not trusted. A branch would keep rows in
  // registers apart, and the rstd of single elements from being computed once. Rows in registers
  // are read again from global memory; a single element that is not finite is NaN by then.
  static constexpr bool kInRegisters = Tile::kVectorRows > 0;
  static constexpr bool kAlwaysStored = kInRegisters || (Tile::kCols == 1 && Norm::kCentered);
  // Of a trusted row, which is 1. H200, LayerNorm, share of copy with kAny and kOne: 0.85 0.89 at
  // 40 columns of bf16, 0.80 0.83 at 191; but 0.95 0.89 at 101 of float32, 0.97 0.97 at 47.
  static constexpr RowScale kTrusted =
      sizeof(typename Op::Source::Row) >= 4 ? RowScale::kAny : RowScale::kOne;

 public:
  using Row = typename Op::Source::Row;
  using Y = typename Epilogue::Output;
  using A = Accumulator<Row>;
  using Source = FlatSpan<Tile, Row>;
  using Target = FlatSpan<Tile, Y>;
  static_assert(sizeof(Y) == sizeof(Row));  // the output takes the input's place
  static_assert(std::is_same_v<typename Op::Args, NormForwardArgs>, "nothing beside the row");

  __device__ __forceinline__ explicit FlatRows(const NormForwardArgs& args)
      : args_(args),
        first_(static_cast<std::int64_t>(blockIdx.x) * Tile::kCtaRows),
        count_(static_cast<int>(min(args.rows - first_, std::int64_t{Tile::kCtaRows}))) {}

  __device__ __forceinline__ void load_parameters() {
    Tile::each_pack([&](int own, int i, const typename Tile::RowLane& lane) {
      parameters_[own][i] = Epilogue::template load<Norm, typename Tile::Access, N>(
          args_, first_, lane.col(i), lane.template valid<N>(i));
    });
  }

  __device__ __forceinline__ int elements() const { return count_ * Tile::kCols; }
  __device__ __forceinline__ const Row* input() const {
    return static_cast<const Row*>(args_.input.data) + first_ * Tile::kCols;
  }
  __device__ __forceinline__ Y* output() const {
    return static_cast<Y*>(args_.output.data) + first_ * Tile::kCols;
  }
  // Rows past the last one hold arbitrary values, and are stored only in shared memory.
  __device__ __forceinline__ bool is_there(int row) const { return row < count_; }

  // Computes the CTA's row number `row`, which is number `at` of the spans. Returns whether its
  // moments are trusted. If not, it has to be taken again.
  __device__ __forceinline__ bool take(const Source& from, const Target& to, int at,
                                       int row) const {
    OwnPacks<Tile, Row, kVectors> packs;
    load(from, at, packs);
    Moments<A> moments;
    const bool trust = flat_moments<Norm, Tile>(packs, moments) || !is_there(row);
    if (kAlwaysStored || trust) {
      finish<kTrusted>(to, at, row, packs, moments, A(1));
    }
    return trust;
  }

  // Computes a row that is left, because its moments were not trusted, or in registers because its
  // vector is not whole. All lanes of a warp call it, because they take part in its sums; those
  // with `wanted` store their row.
  __device__ __forceinline__ void take_again(const Source& from, const Target& to, int row,
                                             bool wanted) const {
    static_assert(!kInRegisters || Tile::kThreads == 1, "lanes decide for themselves");
    OwnPacks<Tile, Row, kVectors> packs;
    load(from, row, packs);
    Moments<A> moments;
    A scale = 1;
    if (!kInRegisters || !flat_moments<Norm, Tile>(packs, moments)) {
      moments = careful_moments<Norm>(from, row, scale);
    }
    __syncwarp();  // all lanes have read what is overwritten now
    if (wanted) {
      finish<RowScale::kAny>(to, row, row, packs, moments, scale);
    }
  }

 private:
  __device__ __forceinline__ static void load(const Source& from, int at,
                                              OwnPacks<Tile, Row, kVectors>& packs) {
    Tile::each_pack([&](int own, int i, const typename Tile::RowLane& lane) {
      packs[own][i] = from.load(at, lane, i);
    });
  }
  template <RowScale kScale>
  __device__ __forceinline__ void finish(const Target& to, int at, int row,
                                         const OwnPacks<Tile, Row, kVectors>& packs,
                                         const Moments<A>& moments, A scale) const {
    const bool saves =
        !kInRegisters && is_there(row) && static_cast<int>(threadIdx.x) % Tile::kThreads == 0;
    const Normalizer<A> normalizer = normalizer_of<Norm>(
        args_, moments, scale, reciprocal(static_cast<A>(Tile::kCols)), first_ + row, saves);
    Tile::each_pack([&](int own, int i, const typename Tile::RowLane& lane) {
      Epilogue epilogue(args_, first_ + row, lane);
      const typename Epilogue::template Beside<N, kVectors> nothing{};
      A values[N];
      to_values(packs[own][i], values);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        values[j] = Norm::template normalized<kScale>(values[j], normalizer);
      }
      epilogue.template apply<Norm>(parameters_[own][i], nothing, i, values);
      to.store(at, lane, i, rounded<Y>(values));
    });
  }

  const NormForwardArgs& args_;
  std::int64_t first_;  // of the CTA's rows
  int count_;
  typename Epilogue::template Parameters<N> parameters_[Tile::kOwnLanes][kVectors];
};

// Rows that fill vectors: kOfVector rows each. A thread has kCount vectors, kFlatThreads apart, and
// no other thread needs what it loads.
template <typename Op, typename Tile>
struct FlatVectors {
  using Rows = FlatRows<Op, Tile>;
  using Row = typename Rows::Row;
  static constexpr int kOfVector = Tile::kVectorRows;
  static constexpr int kCount = Tile::kRows / kOfVector;
  static constexpr unsigned kAll = (1u << kOfVector) - 1;

  Rows& rows;

  __device__ __forceinline__ static int number(int i) {
    return i * kFlatThreads + static_cast<int>(threadIdx.x);
  }
  __device__ __forceinline__ static int row(int turn) {
    return number(turn / kOfVector) * kOfVector + turn % kOfVector;
  }
  // Whether the whole vector is inside the span.
  __device__ __forceinline__ bool is_whole(int i) const {
    return (number(i) + 1) * kVector<Row> <= rows.elements();
  }

  // Computes all rows of whole vectors, and stores them. Returns those that are left, a bit for
  // each turn: their moments are not trusted, or their vector is not whole.
  __device__ __forceinline__ unsigned take(const uint4* from, uint4* to) const {
    uint4 in[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      in[i] = is_whole(i) ? from[number(i)] : uint4{};
    }
    rows.load_parameters();
    unsigned left = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      uint4 out;
      unsigned untrusted = 0;
#pragma unroll
      for (int k = 0; k < kOfVector; ++k) {
        const bool trust = rows.take({&in[i]}, {&out}, k, row(i * kOfVector + k));
        untrusted |= (trust ? 0u : 1u) << k;
      }
      left |= (is_whole(i) ? untrusted : kAll) << (i * kOfVector);
      if (is_whole(i)) {
        to[number(i)] = out;
      }
    }
    return left;
  }
};

template <typename Op, typename Tile>
__device__ __forceinline__ void forward_flat_vectors(FlatRows<Op, Tile>& rows) {
  const FlatVectors<Op, Tile> vectors{rows};
  auto* const from = const_cast<uint4*>(reinterpret_cast<const uint4*>(rows.input()));
  auto* const to = reinterpret_cast<uint4*>(rows.output());
  const unsigned left = vectors.take(from, to);
#pragma unroll 1
  for (int turn = 0; turn < Tile::kRows && __any_sync(kAllLanes, left >> turn != 0); ++turn) {
    const int row = vectors.row(turn);
    const bool wanted = rows.is_there(row) && (left >> turn & 1u) != 0;
    rows.take_again({from}, {to}, wanted ? row : 0, wanted);
  }
}

template <typename Op, typename Tile>
__device__ __forceinline__ void forward_flat_rows(FlatRows<Op, Tile>& rows) {
  using Rows = FlatRows<Op, Tile>;
  using Row = typename Rows::Row;
  constexpr int kOwnBytes = Tile::kCols * static_cast<int>(sizeof(Row)) / Tile::kThreads;
  constexpr int kOverlap = kOwnBytes < 32 ? 32 / kOwnBytes : 1;  // rows of a thread at once
  __shared__ uint4 shared[Tile::kCtaRows * Tile::kCols / kVector<Row>];
  const typename Rows::Source source{shared};
  const typename Rows::Target target{shared};
  source.read(rows.input(), rows.elements());
  rows.load_parameters();
  __syncthreads();
  // Rows past the last one, taken a second time, made 63 columns take 10.2 us at 16897 rows and 5.8
  // us at 33792 (bf16, H200).
  unsigned untrusted = 0;  // one bit for each turn
#pragma unroll kOverlap
  for (int turn = 0; turn < Tile::kRows; ++turn) {
    const int row = Tile::template row<Row>(turn);
    const bool trust = rows.take(source, target, row, row);
    untrusted |= (trust ? 0u : 1u) << turn;
  }
#pragma unroll 1
  for (int turn = 0; turn < Tile::kRows && __any_sync(kAllLanes, untrusted >> turn != 0); ++turn) {
    const int row = Tile::template row<Row>(turn);
    rows.take_again(source, target, row, (untrusted >> turn & 1u) != 0);
  }
  __syncthreads();
  target.write(rows.output(), rows.elements());
}

// grid: enough CTAs for all rows.
template <typename Op, typename Tile>
__global__ void __launch_bounds__(kFlatThreads, Tile::kCtasPerSm)
    forward_flat_kernel(const __grid_constant__ NormForwardArgs args) {
  await_kernels_before();
  FlatRows<Op, Tile> rows(args);
  if constexpr (Tile::kVectorRows > 0) {
    forward_flat_vectors(rows);
  } else {
    forward_flat_rows(rows);
  }
}

}  // namespace fused_op::cuda
