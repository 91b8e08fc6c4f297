// The forward kernel for rows that fit into the registers of one CTA. A row is read once and stays
// in registers, packed as it came. Its moments take two passes over the registers; then it is
// normalised and stored. The tile, integers that the plan chose (plan.h), says which threads hold a
// row. Compiled by nvcc and by NVRTC; torch-free.
#pragma once

#include "core/epilogue.h"
#include "core/norm_args.h"
#include "core/norm_math.h"
#include "core/source.h"
#include "cuda/access.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/forward_halves.cuh"
#include "cuda/forward_layout.h"
#include "cuda/row_sum.cuh"
#include "cuda/words.cuh"

namespace fused_op::cuda {

// How many threads any SM of the architecture holds. ptxas refuses __launch_bounds__ that exceed
// it.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kMostSmThreads = 1024;
#else
constexpr int kMostSmThreads = 1536;
#endif

// How a row is spread over threads. It has kLanes lanes, or as many whole warps as it needs. A warp
// has kLanes · kVectors neighbouring packs of kPack elements; each lane has every kLanes-th of
// them.
template <int kPack_, int kLanes_, int kVectors_, int kAhead_, bool kFew_, int kThreads_,
          int kCtasPerSm_, int kWidth_, bool kFull_>
struct ForwardTile {
  static constexpr int kPack = kPack_;
  static constexpr int kLanes = kLanes_;
  static constexpr int kVectors = kVectors_;
  static constexpr int kAhead = kAhead_;  // packs of parameters in flight
  static constexpr bool kFew = kFew_;     // all rows are on the GPU at once: latency counts
  static constexpr int kThreads = kThreads_;
  static constexpr int kCtasPerSm =
      kCtasPerSm_ * kThreads <= kMostSmThreads ? kCtasPerSm_ : kMostSmThreads / kThreads;
  static constexpr int kWidth = kWidth_;  // columns; 0: known at run time
  static constexpr bool kFull = kFull_;   // then no lane has a pack past the end of a row

  static constexpr int kStep = kLanes * kPack;
  static constexpr int kWarpCols = kStep * kVectors;
  static constexpr int kWarps = (kWidth + kWarpCols - 1) / kWarpCols;
  // Packs that the last warp's last lane has inside the row, too.
  static constexpr int kSure = kFull         ? kVectors
                               : kWidth == 0 ? 0
                                             : (kWidth - (kWarps - 1) * kWarpCols) / kStep;
  static constexpr bool kOneWarp = kLanes < kWarpSize || kWarps == 1;  // known at compile time
};

// In place of a Lane, or of a function that returns Lanes, if elements past the end of the row
// count as well.
struct AllElements {
  __device__ __forceinline__ AllElements operator()(int) const { return {}; }
  template <int N>
  __device__ __forceinline__ int valid(int) const {
    return N;
  }
};

// Calls add(x · scale - from, total) for a lane's elements, in one short chain of sums for each
// pack. A long chain would let the scheduler unpack the whole row ahead of it, in twice the
// registers.
template <bool kWhole, typename Lane, typename T, int N, int kVectors, typename A, typename Add>
__device__ __forceinline__ A sum_deviations(const Lane& lane, const Pack<T, N> (&row)[kVectors],
                                            A scale, A from, Add&& add) {
  A total = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    A x[N];
    A part = 0;
    to_values(row[i], x);
    const int valid = lane.template valid<N>(i);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      add(kWhole || valid > j ? x[j] * scale - from : A(0), part);
    }
    total += valid > 0 ? part : A(0);
  }
  return total;
}

// The moments of `count` elements, valid in every lane. sum(row, from, add) is the sum over them of
// what add(x · scale - from, total) adds; past the end of a row there are zeros, and with
// AllElements as `row` they count, too. `refined` takes another pass for the mean. Two passes over
// registers instead of E[x²] - E[x]²: nothing cancels if |mean| >> deviation. Only deviations from
// a mean are checked for the end of the row: with all checked, 0.93 of copy instead of 0.98 at
// 10920x6145 (H100, bf16, RMSNorm).
template <typename Norm, typename T, typename Row, typename A, typename Sum>
__device__ __forceinline__ Moments<A> moments_from(const Row& row, A count, bool refined,
                                                   Sum&& sum) {
  Moments<A> moments{};
  const auto itself = [](A deviation, A& total) { total += deviation; };
  const auto square = [](A deviation, A& total) {
    total = multiply_add(deviation, deviation, total);
  };
  if constexpr (Norm::kCentered) {
    const A inverse_count = count > A(0) ? reciprocal(count) : A(0);
    moments.mean = sum(AllElements{}, A(0), itself) * inverse_count;
    if (refined) {
      moments.mean += sum(row, moments.mean, itself) * inverse_count;
    }
    if constexpr (sizeof(T) >= 4) {  // means of 16-bit elements need no correction below rounding
      moments.rest = sum(row, moments.mean, itself) * inverse_count;
    }
    moments.second = sum(row, moments.mean, square) - count * moments.rest * moments.rest;
  } else {
    moments.second = sum(AllElements{}, A(0), square);
  }
  return moments;
}

// The same of elements held by kLanes neighbouring lanes.
template <typename Norm, bool kWhole, int kLanes, typename Lane, typename T, int N, int kVectors,
          typename A>
__device__ __forceinline__ Moments<A> moments_of_lanes(const Lane& lane,
                                                       const Pack<T, N> (&row)[kVectors], A count,
                                                       A scale, bool refined) {
  return moments_from<Norm, T>(lane, count, refined, [&](const auto& valid, A from, auto&& add) {
    return lane_sum<kLanes>(sum_deviations<kWhole>(valid, row, scale, from, add));
  });
}

// The position of a thread.
struct ForwardPlace {
  std::int64_t row;  // in lanes past the last row, or left over: the last one
  bool live;         // false in those lanes
  int lane;
  int warp;   // number of the warp in its row
  int warps;  // warps of the row
};

// Rows that share a warp are neighbours, so that a warp's loads and stores lie side by side. us
// with rows as far apart as the CTA has warps, and so: 69.2 63.2 at 2097152x32, and with
// statistics 78.0 68.1 (H200, bf16, LayerNorm). By words they are two rows apart: if rows are
// dense, either all of a warp's begin in the middle of a word or none does. Lanes that are left
// over load a part of the last row in the warp. The lane is opaque to the compiler, or it would
// compute each address by itself: it knew that the sum of a lane's first column and a pack's
// distance from there is also their bitwise or.
template <typename Op, typename Tile>
__device__ __forceinline__ ForwardPlace place_of(const typename Op::Args& args, int width) {
  const unsigned thread = threadIdx.x;
  using Groups = LaneGroups<Tile::kLanes>;
  const unsigned in_warp = Groups::kLeft ? thread % kWarpSize : thread;
  ForwardPlace place{blockIdx.x, true, static_cast<int>(in_warp % Tile::kLanes), 0, 1};
  if (Tile::kOneWarp || width <= Tile::kWarpCols) {
    constexpr unsigned kApart = Op::Access::kWhole ? 1 : 2;  // CTAs have an even number of warps
    const unsigned warps = blockDim.x / kWarpSize;
    const unsigned warp = thread / kWarpSize;
    const unsigned first = warp / kApart * (kApart * Groups::kCount) + warp % kApart;
    place.row = place.row * (warps * Groups::kCount) + first + Groups::own() * kApart;
    place.live = place.row < args.rows;
    place.row = place.live ? place.row : args.rows - 1;
    if constexpr (Groups::kLeft) {
      place.live = place.live && in_warp < Groups::kCount * Tile::kLanes;
    }
  } else {
    place.warp = static_cast<int>(thread / kWarpSize);
    place.warps = static_cast<int>(blockDim.x / kWarpSize);
  }
  asm volatile("" : "+r"(place.lane));
  return place;
}

// The normaliser of a row; one thread of the row saves its statistics for backward.
template <typename Norm, typename A>
__device__ __forceinline__ Normalizer<A> normalizer_of(const NormForwardArgs& args,
                                                       Moments<A> moments, A scale, A inverse_cols,
                                                       std::int64_t row, bool saves) {
  unscale(moments, scale);
  const Normalizer<A> normalizer =
      Norm::normalizer(moments, scale, inverse_cols, static_cast<A>(args.eps));
  if (args.stats != nullptr && saves) {
    Norm::save(normalizer, moments, static_cast<A*>(args.stats), row, args.rows);
  }
  return normalizer;
}

// Computes the moments of a row again, element by element: slow, and rare.
template <typename Op, typename Tile, typename A>
struct Rescue {
  using Norm = typename Op::Norm;
  using Row = typename Op::Source::Row;
  static constexpr int N = Tile::kPack;
  using OneVector = Lane<Tile::kLanes, 0, 0, false>;

  const typename Op::Args& args;
  const ForwardPlace& place;
  int width;
  CtaExchange<A> exchange;

  __device__ OneVector lane_of(int i) const {
    // Lanes past the last row load nothing: that row belongs to another warp, which may not have
    // stored it yet.
    return {place.warp * Tile::kWarpCols + place.lane * N + i * Tile::kStep, place.live ? width : 0,
            place.live};
  }
  __device__ void read(const OneVector& lane, Pack<Row, N> (&pack)[1]) const {
    const typename Op::Source source(args, place.row);
    source.template read<LoneWords>(lane, pack);
  }
  // The moments of the elements times `scale`, with a refined mean.
  __device__ Moments<A> moments(A scale) const {
    WarpMoments<A> mine{};
#pragma unroll 1
    for (int i = 0; i < Tile::kVectors; ++i) {
      const OneVector lane = lane_of(i);
      Pack<Row, N> pack[1];
      read(lane, pack);
      const int first = lane.first - place.lane * N;
      const A count = static_cast<A>(max(min(width - first, Tile::kStep), 0));
      mine = append(mine, {count, moments_of_lanes<Norm, false, Tile::kLanes>(lane, pack, count,
                                                                              scale, true)});
    }
    if (place.warps == 1) {
      return mine.moments;
    }
    exchange.barrier();  // all have read before it is written again
    exchange.put(place.warp, mine);
    exchange.barrier();
    return merge_parts<Norm::kCentered, kMaxRowWarps>(exchange.parts, place.warps,
                                                      reciprocal(static_cast<A>(width)));
  }
  __device__ void write(const Normalizer<A>& normalizer) const {
    using Epilogue = typename Op::Epilogue;
    using Y = typename Op::Epilogue::Output;
    Y* const output = static_cast<Y*>(args.output.data) + place.row * width;
#pragma unroll 1
    for (int i = 0; i < Tile::kVectors; ++i) {
      const OneVector lane = lane_of(i);
      Pack<Row, N> pack[1];
      read(lane, pack);
      A values[N];
      to_values(pack[0], values);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        values[j] = Norm::normalized(values[j], normalizer);
      }
      Epilogue epilogue(args, place.row, lane);
      tell(epilogue, normalizer);
      const auto parameters = Epilogue::template load<Norm, typename Op::Access, N>(
          args, place.row, lane.first, width - lane.first);
      typename Epilogue::template Beside<N, 1> beside;
      Epilogue::template load_beside<Words>(args, place.row, lane, beside);
      epilogue.template apply<Norm>(parameters, beside, 0, values);
      const Pack<Y, N> packs[1] = {rounded<Y>(values)};
      Words::store(lane, output, packs);
    }
  }
};

// Finishes the kernel for a warp that has a row whose moments are not trusted(). It is a function
// of its own so that the common path pays neither registers nor length for it. It computes its
// place again: a reference to the kernel's would put that on the stack of every thread.
template <typename Op, typename Tile, typename A>
__device__ __noinline__ void finish_untrusted(const typename Op::Args& args, int width,
                                              Moments<A> moments, WarpMoments<A>* parts) {
  const ForwardPlace place = place_of<Op, Tile>(args, width);
  const Rescue<Op, Tile, A> rescue{args, place, width, CtaExchange<A>{parts}};
  const bool trust = trusted(moments, static_cast<A>(width));
  A scale = 1;
  __syncwarp();  // the row may be the sum, which the lanes have written for each other
#pragma unroll 1
  for (int attempt = 0; attempt < 2; ++attempt) {
    const A next_scale = attempt == 0 ? A(1) : Limits<A>::kScale;
    const Moments<A> refined = rescue.moments(next_scale);
    if (!trust && (attempt == 0 || overflowed(moments))) {
      moments = refined;
      scale = next_scale;
    }
  }
  const bool saves = place.live && place.lane == 0 && place.warp == 0;
  Op::write_again(args, rescue,
                  normalizer_of<typename Op::Norm>(
                      args, moments, scale, reciprocal(static_cast<A>(width)), place.row, saves));
}

// Normalises a lane's packs, whose scale is 1, and stores them. Parameters are loaded kAhead packs
// ahead.
template <typename Op, typename Tile, typename Lane, typename Parameters, typename Row, int N,
          int kVectors, typename A>
__device__ __forceinline__ void write_row(
    const typename Op::Args& args, std::int64_t row, const Lane& lane,
    Parameters (&parameters)[Tile::kAhead],
    const typename Op::Epilogue::template Beside<N, kVectors>& beside,
    const Pack<Row, N> (&packs)[kVectors], const Normalizer<A>& normalizer) {
  using Norm = typename Op::Norm;
  using Access = typename Op::Access;
  using Y = typename Op::Epilogue::Output;
  using Epilogue = typename Op::Epilogue;
  // In a row of several warps, x - mean is not at hand: a warp's moments have its own mean.
  constexpr RowScale kScale = Tile::kOneWarp ? RowScale::kOne : RowScale::kAny;
  Y* const output = static_cast<Y*>(args.output.data) + row * lane.width;
  Epilogue epilogue(args, row, lane);
  tell(epilogue, normalizer);
  const bool together = Access::stores_together(output + lane.first);
  Pack<Y, N> results[Access::kStoresTogether ? kVectors : 1];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    A values[N];
    to_values(packs[i], values);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      values[j] = Norm::template normalized<kScale>(values[j], normalizer);
    }
    epilogue.template apply<Norm>(parameters[i % Tile::kAhead], beside, i, values);
    Pack<Y, N>& result = results[Access::kStoresTogether ? i : 0];
    result = rounded<Y>(values);
    if (!together) {
      Access::store_pack(lane, output, i, result);
    }
    if (i + Tile::kAhead < kVectors) {
      const int next = i + Tile::kAhead;
      auto& own = parameters[i % Tile::kAhead];
      own = Epilogue::template load<Norm, Access, N>(args, row, lane.col(next),
                                                     lane.template valid<N>(next), own);
    }
  }
  if constexpr (Access::kStoresTogether) {
    if (together) {
      Access::store(lane, output, results);
    }
  }
}

// What a kernel computes, and where a row goes once its normaliser is known: write() has it in
// registers, write_again() has to read it once more. prepare() may change what was loaded before
// the source turns it into a row.
template <typename Norm_, typename Source_, typename Epilogue_, typename Access_>
struct ForwardOp {
  using Args = typename Epilogue_::Args;
  using Norm = Norm_;
  using Source = Source_;
  using Epilogue = Epilogue_;
  using Access = Access_;
  static constexpr bool kSumIsAll = false;  // only what the source stores is wanted

  template <typename Tile, typename Lane, typename Loaded>
  __device__ __forceinline__ static void prepare(const Args&, const ForwardPlace&, const Lane&,
                                                 Loaded&) {}
  template <typename Tile, typename Lane, typename Parameters, typename Beside, typename Packs,
            typename A>
  __device__ __forceinline__ static void write(const Args& args, const ForwardPlace& place,
                                               const Lane& lane, Parameters& parameters,
                                               const Beside& beside, const Packs& packs,
                                               const Normalizer<A>& normalizer) {
    if constexpr (kTakesHalves<ForwardOp, Tile>) {
      write_halves<ForwardOp>(args, place.row, lane, parameters, packs, normalizer);
    } else {
      write_row<ForwardOp, Tile>(args, place.row, lane, parameters, beside, packs, normalizer);
    }
  }
  template <typename Rescue, typename A>
  __device__ __forceinline__ static void write_again(const Args&, const Rescue& rescue,
                                                     const Normalizer<A>& normalizer) {
    rescue.write(normalizer);
  }
};

// Processes this lane's part of a row. KernelTile is the tile of all warps, Tile that of this one.
template <typename Op, typename KernelTile, typename Tile, typename A>
__device__ __forceinline__ void take_row(const typename Op::Args& args, const ForwardPlace& place,
                                         int width, WarpMoments<A> (&parts)[kMaxRowWarps]) {
  using Norm = typename Op::Norm;
  using Source = typename Op::Source;
  using Epilogue = typename Op::Epilogue;
  using Access = typename Op::Access;
  using Row = typename Source::Row;
  constexpr int N = Tile::kPack;
  constexpr bool kWhole = Access::kWhole || (Tile::kWidth > 0 && Tile::kWidth % N == 0);

  const Lane<Tile::kLanes, Tile::kStep, Tile::kSure, !Tile::kFew> lane{
      place.warp * Tile::kWarpCols + place.lane * N, width, place.live};
  const Source source(args, place.row);
  if (blockIdx.x < kPrefetchingCtas) {
    source.template prefetch<Access, Tile::kVectors>(lane);
  }
  await_kernels_before();
  Pack<Row, N> row[Tile::kVectors];
  typename Source::template Loaded<N, Tile::kVectors> loaded;
  typename Epilogue::template Beside<N, Tile::kVectors> beside;
  source.template load<Access>(lane, loaded);
  Epilogue::template load_beside<Access>(args, place.row, lane, beside);
  Op::template prepare<Tile>(args, place, lane, loaded);
  source.template finish<Access>(lane, loaded, row);
  if constexpr (Op::kSumIsAll) {
    return;
  }
  constexpr int kAhead = kTakesHalves<Op, Tile> ? Tile::kVectors : Tile::kAhead;
  typename Epilogue::template Parameters<N> parameters[kAhead];
  const auto load_parameters = [&] {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      parameters[i] = Epilogue::template load<Norm, Access, N>(args, place.row, lane.col(i),
                                                               lane.template valid<N>(i));
    }
  };
  if constexpr (Tile::kFew) {
    load_parameters();
  }
  const A inverse_cols = reciprocal(static_cast<A>(width));
  const A count = static_cast<A>(
      Tile::kFull ? Tile::kWarpCols
                  : max(min(width - place.warp * Tile::kWarpCols, Tile::kWarpCols), 0));
  Moments<A> moments = moments_of_lanes<Norm, kWhole, Tile::kLanes>(lane, row, count, A(1), false);
  if (!Tile::kOneWarp && place.warps > 1) {
    const CtaExchange<A> exchange{parts};
    exchange.put(place.warp, {count, moments});
    exchange.barrier();
    moments = merge_parts<Norm::kCentered, kMaxRowWarps>(parts, place.warps, inverse_cols);
  }
  // Every thread of a row decides the same. Rows that share a warp go together.
  if (!__all_sync(kAllLanes, trusted(moments, static_cast<A>(width)))) {
    finish_untrusted<Op, KernelTile>(args, width, moments, parts);
    return;
  }
  const bool saves = place.live && place.lane == 0 && place.warp == 0;
  const Normalizer<A> normalizer =
      normalizer_of<Norm>(args, moments, A(1), inverse_cols, place.row, saves);
  if constexpr (!Tile::kFew) {
    load_parameters();
  }
  Op::template write<Tile>(args, place, lane, parameters, beside, row, normalizer);
}

// Which calls have code of their own for full warps. us without and with: LayerNorm 82.2 76.0 at
// 13112x5121, 77.2 72.8 at 6712x9999; but 138.3 145.4 at 13112x5121 with a residual (H200, bf16).
template <typename Norm, typename X, bool kSplit, typename W, typename Y, typename Access>
constexpr bool kHasFullWarps<ForwardOp<Norm, Plain<X, kSplit>, Affine<W, Y>, Access>> =
    sizeof(X) == 2 && !Access::kWhole;

// grid: enough CTAs for all rows; block: whole rows, or one row if it takes several warps.
template <typename Op, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    forward_kernel(const __grid_constant__ typename Op::Args args) {
  __shared__ WarpMoments<Accumulator<typename Op::Source::Row>> parts[kMaxRowWarps];
  const int width = Tile::kWidth > 0 ? Tile::kWidth : static_cast<int>(args.cols);
  const ForwardPlace place = place_of<Op, Tile>(args, width);
  if constexpr (kHasFullWarps<Op> && kLastWarpDiffers<Tile>) {
    if (place.warp + 1 < Tile::kWarps) {
      take_row<Op, Tile, FullWarp<Tile>>(args, place, width, parts);
      return;
    }
  }
  take_row<Op, Tile, Tile>(args, place, width, parts);
}

}  // namespace fused_op::cuda
