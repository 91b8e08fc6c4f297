// How forward_kernel spreads rows over threads, and the moments of what a thread holds of a row.
// Device code; torch-free.
#pragma once

#include "core/norm_math.h"
#include "core/pack.h"
#include "cuda/access.cuh"
#include "cuda/row_sum.cuh"

namespace fused_op::cuda {

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
  static constexpr int kCtasPerSm = ctas_with_room(kCtasPerSm_, kThreads);
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

}  // namespace fused_op::cuda
