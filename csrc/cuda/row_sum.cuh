// Sums over the threads of one row: over lanes, and then over warps in index order. The order is a
// function of the row's tile alone (never of the grid, the row's number or its address), so a row
// gives the same bits wherever it stands. Device code only; torch-free.
#pragma once

#include "core/norm_math.h"
#include "core/pack.h"

namespace fused_op::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;

// Groups of kLanes neighbouring lanes. Lanes that are left over at the end of a warp count as the
// last group's.
template <int kLanes>
struct LaneGroups {
  static constexpr int kCount = kWarpSize / kLanes;
  static constexpr bool kLeft = kCount * kLanes < kWarpSize;  // some lanes

  __device__ __forceinline__ static int own() {
    const int group = static_cast<int>(threadIdx.x % kWarpSize / kLanes);
    return kLeft ? min(group, kCount - 1) : group;
  }
};

// Sum over a group; the same in every lane of it. All 32 lanes must call it.
template <int kLanes, typename A>
__device__ __forceinline__ A lane_sum(A value) {
  constexpr int kEven = kLanes & -kLanes;  // the power of two in kLanes
#pragma unroll
  for (int offset = kEven / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, offset);
  }
  if constexpr (kEven < kLanes) {
    const int first = LaneGroups<kLanes>::own() * kLanes;
    const A part = value;
    value = __shfl_sync(kAllLanes, part, first);
#pragma unroll
    for (int lane = kEven; lane < kLanes; lane += kEven) {
      value += __shfl_sync(kAllLanes, part, first + lane);
    }
  }
  return value;
}

// The same for several values, side by side. (lane_sum does not call it: its instructions would be
// scheduled differently.)
template <int kLanes, int kValues, typename A>
__device__ __forceinline__ void lane_sums(A (&values)[kValues]) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int k = 0; k < kValues; ++k) {
      values[k] += __shfl_xor_sync(kAllLanes, values[k], offset);
    }
  }
}

// Moments from sums[0], the sum of the values' deviations from a pivot, and sums[1], the sum of
// their squares. Both can be summed at once, whereas deviations from the mean would have to wait
// for it. Returns false if the subtraction cancels more than a factor of 16; the mean then has to
// be the pivot. The pivot is one of the values or the mean of some, so this happens for one in ten
// thousand rows of normally distributed values (or pixels, of which a warp may take 128 together).
template <typename A>
__device__ __forceinline__ bool moments_of(const A (&sums)[2], A pivot, A inverse_count,
                                           Moments<A>& moments) {
  const A step = sums[0] * inverse_count;
  const A square = sums[0] * step;
  moments.mean = pivot + step;
  moments.rest = step - (moments.mean - pivot);
  moments.second = sums[1] - square;
  return !(square > sums[1] * A(0.9375));  // 15/16; no product that could overflow
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

// Appends `next` to the moments of a warp's share so far. (The square of the difference is not
// computed by itself, because it may overflow if so_far is empty.)
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
           a.second + b.second + difference * (step * so_far.count)}};
}

// Merges `count` parts, `parts[0]` among them; valid in every lane. Of every kLanes neighbouring
// lanes, lane i takes every kLanes-th part. Means enter as distances from the first part's mean, or
// from the merged mean if that cancels too much. A constant row therefore stays exactly constant.
template <bool kCentered, int kMaxParts, typename A>
__device__ __forceinline__ Moments<A> merge_parts(const WarpMoments<A>* parts, int count,
                                                  A inverse_cols) {
  constexpr int kLanes = kMaxParts < kWarpSize ? kMaxParts : kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  // The sums over all parts of what add_terms(part, totals) adds. If there are at most kLanes
  // parts, each lane has one, and there is no loop.
  const auto sum = [&]<int kTerms>(A(&totals)[kTerms], auto&& add_terms) {
    if (lane < count) {
      add_terms(parts[lane], totals);
    }
    if constexpr (kMaxParts > kLanes) {
#pragma unroll 2
      for (int part = lane + kLanes; part < count; part += kLanes) {
        add_terms(parts[part], totals);
      }
    }
    lane_sums<kLanes>(totals);
  };
  Moments<A> merged{};
  if constexpr (!kCentered) {
    A second[1] = {};
    sum(second, [](const WarpMoments<A>& part, A(&to)[1]) { to[0] += part.moments.second; });
    merged.second = second[0];
  } else {
    const auto deviation = [](const WarpMoments<A>& part, A from) {
      return part.count > A(0) ? part.moments.mean - from + part.moments.rest : A(0);
    };
    // H200, bf16, LayerNorm, with two sums one after the other and with both at once: 0.957 0.967
    // of the limit at 16384x8192, 2.04 1.95 us at 3x4096.
    const auto merge = [&](A pivot) {
      A sums[2] = {};
      sum(sums, [&](const WarpMoments<A>& part, A(&to)[2]) {
        const A distance = deviation(part, pivot);
        to[0] += part.count * distance;
        to[1] += part.moments.second + part.count * distance * distance;
      });
      return moments_of(sums, pivot, inverse_cols, merged);
    };
    if (!merge(parts[0].moments.mean)) {
      merge(merged.mean);
    }
  }
  return merged;
}

// How the warps of a CTA exchange the parts of a row. (Those of a cluster: cluster_exchange.cuh.)
template <typename A>
struct CtaExchange {
  WarpMoments<A>* parts;  // in shared memory

  // As __syncthreads(), but warps may come here by different copies of the code.
  __device__ __forceinline__ void barrier() const { asm volatile("bar.sync 0;" ::: "memory"); }
  __device__ __forceinline__ void put(int part, const WarpMoments<A>& mine) const {
    if (threadIdx.x % kWarpSize == 0) {
      parts[part] = mine;
    }
  }
};

}  // namespace fused_op::cuda
