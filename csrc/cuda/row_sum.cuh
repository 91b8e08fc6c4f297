// Sums over the threads of one row: lane -> warp -> warps in index order. The order is a function
// of the row's tile alone (never of the grid, the row's number or its address), so a row gives the
// same bits wherever it stands. Device code only; torch-free.
#pragma once

#include "core/norm_math.h"
#include "cuda/row_tile.h"

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

// Merges `count` parts, `parts[0]` among them; valid in every lane. Of every kLanes neighbouring
// lanes, lane i takes every kLanes-th part. Means are only ever compared with the first part's
// mean: no cancellation, and a constant row stays exactly constant.
template <bool kCentered, int kMaxParts, typename A>
__device__ __forceinline__ Moments<A> merge_parts(const WarpMoments<A>* parts, int count, A cols,
                                                  A inverse_cols) {
  constexpr int kLanes = kMaxParts < kWarpSize ? kMaxParts : kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  // The sum over all parts. Up to kLanes of them, there is one a lane, and no loop.
  const auto sum = [&](auto&& term) {
    A total = lane < count ? term(parts[lane]) : A(0);
    if constexpr (kMaxParts > kLanes) {
#pragma unroll 2
      for (int part = lane + kLanes; part < count; part += kLanes) {
        total += term(parts[part]);
      }
    }
    return lane_sum<kLanes>(total);
  };
  Moments<A> merged{};
  if constexpr (!kCentered) {
    merged.second = sum([](const WarpMoments<A>& part) { return part.moments.second; });
  } else {
    const A pivot = parts[0].moments.mean;
    const auto deviation = [](const WarpMoments<A>& part, A from) {
      return part.moments.mean - from + part.moments.rest;
    };
    const A step = sum([&](const WarpMoments<A>& part) {
                     return part.count > A(0) ? part.count * deviation(part, pivot) : A(0);
                   }) *
                   inverse_cols;
    merged.mean = pivot + step;
    merged.rest = step - (merged.mean - pivot);
    merged.second = sum([&](const WarpMoments<A>& part) {
      const A distance = part.count > A(0) ? deviation(part, merged.mean) : A(0);
      return part.moments.second + part.count * distance * distance;
    });
    merged.second -= cols * merged.rest * merged.rest;
  }
  return merged;
}

// How the warps of a CTA exchange the parts of a row. (Those of a cluster: cluster_exchange.cuh.)
template <typename A>
struct CtaExchange {
  WarpMoments<A>* parts;  // in shared memory

  __device__ __forceinline__ void barrier() const { __syncthreads(); }
  __device__ __forceinline__ void put(int part, const WarpMoments<A>& mine) const {
    if (threadIdx.x % kWarpSize == 0) {
      parts[part] = mine;
    }
  }
};

}  // namespace fused_op::cuda
