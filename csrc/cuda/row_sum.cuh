// Sums over the threads of one row: lane -> warp -> warps in index order. The order is a function
// of the row's tile alone (never of the grid, the row's number or its address), so a row gives the
// same bits wherever it stands. Device code only; torch-free.
#pragma once

#include <cooperative_groups.h>

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

// Merges what lane i of every kParts neighbouring lanes holds for part i of a row (lanes without a
// part hold count 0; lane 0 has one). Means are only ever compared with the first part's mean: no
// cancellation, and a constant row stays exactly constant.
template <bool kCentered, int kParts, typename A>
__device__ __forceinline__ Moments<A> merge_moments(const WarpMoments<A>& part, A cols,
                                                    A inverse_cols) {
  Moments<A> merged{};
  A deviation = 0;
  if constexpr (kCentered) {
    const A pivot = __shfl_sync(kAllLanes, part.moments.mean, 0, kParts);
    deviation = part.count > A(0) ? part.moments.mean - pivot + part.moments.rest : A(0);
    const A step = lane_sum<kParts>(part.count * deviation) * inverse_cols;
    merged.mean = pivot + step;
    merged.rest = step - (merged.mean - pivot);
    deviation = part.count > A(0) ? part.moments.mean - merged.mean + part.moments.rest : A(0);
  }
  merged.second = lane_sum<kParts>(part.moments.second + part.count * deviation * deviation);
  if constexpr (kCentered) {
    merged.second -= cols * merged.rest * merged.rest;
  }
  return merged;
}

// The moments of a row of `warps` parts; valid in every lane.
template <bool kCentered, int kMaxParts, typename A>
__device__ __forceinline__ Moments<A> merge_parts(const WarpMoments<A>* parts, int warps, A cols,
                                                  A inverse_cols) {
  constexpr int kLanes = kMaxParts < kWarpSize ? kMaxParts : kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  WarpMoments<A> mine = lane < warps ? parts[lane] : WarpMoments<A>{};
  if constexpr (kMaxParts > kWarpSize) {
#pragma unroll 1
    for (int part = lane + kWarpSize; part < warps; part += kWarpSize) {
      mine = append(mine, parts[part]);
    }
  }
  return merge_moments<kCentered, kLanes>(mine, cols, inverse_cols);
}

// How the warps of a row exchange their parts. The parts are merged in an order that depends on
// their number alone, and alike in both, since a part of no elements adds nothing.
//
// Through the shared memory of their CTA:
template <int kMaxParts_, typename A>
struct CtaExchange {
  static constexpr int kMaxParts = kMaxParts_;
  WarpMoments<A>* parts;  // [kMaxParts] in shared memory

  __device__ __forceinline__ void begin() const {}
  __device__ __forceinline__ void ready() const {}
  __device__ __forceinline__ void barrier() const { __syncthreads(); }
  __device__ __forceinline__ void put(int warp, const WarpMoments<A>& mine) const {
    if (threadIdx.x % kWarpSize == 0) {
      parts[warp] = mine;
    }
  }
};

// Through the shared memory of every CTA of their cluster. That of another CTA exists once it runs:
// between begin() and ready() there may be work that needs none of it.
template <int kMaxParts_, typename A>
struct ClusterExchange {
  static constexpr int kMaxParts = kMaxParts_;
  WarpMoments<A>* parts;

#if __CUDA_ARCH__ >= 900
  __device__ __forceinline__ void begin() const {
    cooperative_groups::cluster_group::barrier_arrive();
  }
  __device__ __forceinline__ void ready() const {
    cooperative_groups::cluster_group::barrier_wait();
  }
  __device__ __forceinline__ void barrier() const { cooperative_groups::cluster_group::sync(); }
  __device__ __forceinline__ void put(int warp, const WarpMoments<A>& mine) const {
    const auto cluster = cooperative_groups::this_cluster();
    const unsigned lane = threadIdx.x % kWarpSize;
    if (lane < cluster.num_blocks()) {
      *cluster.map_shared_rank(parts + warp, lane) = mine;
    }
  }
#else  // never launched: rows are streamed instead
  __device__ __forceinline__ void begin() const {}
  __device__ __forceinline__ void ready() const {}
  __device__ __forceinline__ void barrier() const {}
  __device__ __forceinline__ void put(int, const WarpMoments<A>&) const {}
#endif
};

}  // namespace fused_op::cuda
