// Sums over the threads of one row: lane -> warp -> warps in index order. The order is a function
// of the row's tile alone (never of the grid, the row's number or its address), so a row gives the
// same bits wherever it stands. Device code only; torch-free.
#pragma once

#include "core/norm_math.h"

namespace fused_op::cuda {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// 1 / value for a normal value, to the last bit or next to it: three instructions where the
// compiler's division takes twenty and a call.
__device__ __forceinline__ float reciprocal(float value) {
  float estimate;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(value));
  return fmaf(fmaf(-value, estimate, 1.0f), estimate, estimate);
}
__device__ __forceinline__ double reciprocal(double value) { return 1.0 / value; }

// Sum over groups of kLanes neighbouring lanes; valid in every lane. All 32 lanes must call.
template <int kLanes, typename A>
__device__ __forceinline__ A lane_sum(A value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, offset);
  }
  return value;
}

// Barrier among the `threads` of one row; rows of one CTA use different ids.
__device__ __forceinline__ void row_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id + 1), "r"(threads) : "memory");
}

// Moments of one warp's share of a row, with the number of elements they stand for.
template <typename A>
struct WarpMoments {
  A count;
  Moments<A> moments;
};

// Appends `next` to the moments of a warp's share so far.
template <typename A>
__device__ __forceinline__ WarpMoments<A> append(const WarpMoments<A>& so_far,
                                                 const WarpMoments<A>& next) {
  const A count = so_far.count + next.count;
  if (count == A(0)) {
    return so_far;
  }
  const Moments<A>& a = so_far.moments;
  const Moments<A>& b = next.moments;
  const A difference = (b.mean - a.mean) + (b.rest - a.rest);
  const A step = difference * (next.count * reciprocal(count));
  const A mean = a.mean + step;
  return {count,
          {mean, a.rest + (step - (mean - a.mean)),
           a.second + b.second + difference * step * so_far.count}};
}

// Merges what lane i holds for part i of a row (lanes without a part hold count 0; lane 0 has one).
// Means are only ever compared with the first part's mean: no cancellation, and a constant row
// stays exactly constant.
template <bool kCentered, typename A>
__device__ __forceinline__ Moments<A> merge_moments(const WarpMoments<A>& part, A cols,
                                                    A inverse_cols) {
  Moments<A> merged{};
  A deviation = 0;
  if constexpr (kCentered) {
    const A pivot = __shfl_sync(kAllLanes, part.moments.mean, 0);
    deviation = part.count > A(0) ? part.moments.mean - pivot + part.moments.rest : A(0);
    const A step = lane_sum<kWarpSize>(part.count * deviation) * inverse_cols;
    merged.mean = pivot + step;
    merged.rest = step - (merged.mean - pivot);
    deviation = part.count > A(0) ? part.moments.mean - merged.mean + part.moments.rest : A(0);
  }
  merged.second = lane_sum<kWarpSize>(part.moments.second + part.count * deviation * deviation);
  if constexpr (kCentered) {
    merged.second -= cols * merged.rest * merged.rest;
  }
  return merged;
}

}  // namespace fused_op::cuda
