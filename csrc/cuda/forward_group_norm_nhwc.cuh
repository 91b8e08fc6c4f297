// Forward of the group norm of images whose channels are neighbours: group_norm_nhwc.h. Compiled by
// NVRTC; torch-free.
#pragma once

#include "cuda/dependent_launch.cuh"
#include "cuda/group_norm_nhwc.cuh"

namespace fused_op::cuda {

// What the second kernel leaves of each channel: rows of NhwcRow, [samples, channels] each.
template <typename A>
__device__ __forceinline__ A* nhwc_row(const GroupNormForwardArgs& args, int row) {
  return static_cast<A*>(args.workspace) + row * args.samples * args.channels;
}
// Behind it are the moments of slabs, [samples, groups, slabs].
template <typename A>
__device__ __forceinline__ WarpMoments<A>* nhwc_slabs(const GroupNormForwardArgs& args) {
  return reinterpret_cast<WarpMoments<A>*>(nhwc_row<A>(args, kNhwcForwardRows));
}

// How the moments of a slab are taken: a group's elements are seen as deviations from one of them.
// If that cancels too much, the group needs another pass, with deviations from the mean. If squares
// overflow, it needs a pass over elements times Limits::kScale; the count of its moments is then
// negative.
enum NhwcPass { kFromElement, kFromMean, kScaledFromElement, kScaledFromMean, kNoPass };

template <typename Op>
struct NhwcMoments {
  using A = typename Op::A;
  using E = typename Op::E;
  static constexpr int N = Op::N;
  struct Sums {
    A sums[2];
  };

  const GroupNormForwardArgs& args;
  const GroupNormNhwcSteps& steps;
  const NhwcPlace<Op>& place;
  bool has_one;  // group in each pack; its channels are added up first
  // In shared memory:
  void* room;   // for pixels on their way
  Sums* sums;   // in the same place, afterwards; [packs or channels of the tile, rows]
  A* pivots;    // [tile groups]
  int* passes;  // [tile groups] that groups need

  __device__ __forceinline__ A element_of(int g) const {
    const std::int64_t pixel =
        place.sample * args.pixels + std::int64_t{place.slab} * steps.slab_pixels;
    return load_value<A>(true, static_cast<const E*>(args.input) + pixel * args.channels +
                                   std::int64_t{place.group + g} * steps.group_channels);
  }

  // The sums of the thread's channels. All threads of the CTA call it.
  __device__ __forceinline__ void add(A scale) const {
    A own_pivots[N];
    Sums own[N] = {};
#pragma unroll
    for (int j = 0; j < N; ++j) {
      own_pivots[j] = pivots[(place.channel + (has_one ? 0 : j)) / steps.group_channels];
    }
    place.walk({args.input}, room, [&](const auto& packs, std::int64_t) {
      A values[N];
      to_values(packs[0], values);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const A deviation = multiply_add(values[j], scale, -own_pivots[j]);
        own[j].sums[0] += deviation;
        own[j].sums[1] = multiply_add(deviation, deviation, own[j].sums[1]);
      }
    });
    __syncthreads();  // no pixel is on its way
    if (place.row >= place.rows) {
      return;
    }
    if (!has_one) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        sums[(place.channel + j) * place.rows + place.row] = own[j];
      }
      return;
    }
#pragma unroll
    for (int j = 1; j < N; ++j) {
      own[0].sums[0] += own[j].sums[0];
      own[0].sums[1] += own[j].sums[1];
    }
    sums[place.channel / N * place.rows + place.row] = own[0];
  }

  // Adds up the sums of a group, by a warp; returns the pass that it needs next.
  __device__ __forceinline__ int finish(int g, int pass) const {
    const int count = steps.group_channels / (has_one ? N : 1) * place.rows;
    A totals[2] = {};
#pragma unroll 4
    for (int k = lane_of_warp(); k < count; k += kWarpSize) {
      totals[0] += sums[g * count + k].sums[0];
      totals[1] += sums[g * count + k].sums[1];
    }
    lane_sums<kWarpSize>(totals);
    const A elements = static_cast<A>(steps.group_channels) * static_cast<A>(place.slab_pixels);
    Moments<A> moments;
    const bool trusted = moments_of(totals, pivots[g], reciprocal(elements), moments);
    const bool scaled = pass >= kScaledFromElement;
    const int next = !scaled && overflowed(moments) ? kScaledFromElement
                     : !trusted && pass % 2 == 0    ? pass + 1
                                                    : kNoPass;
    __syncwarp();  // all have read the pivot
    if (lane_of_warp() == 0) {
      const std::int64_t group = place.sample * steps.groups + place.group + g;
      nhwc_slabs<A>(args)[group * steps.slabs + place.slab] = {scaled ? -elements : elements,
                                                               moments};
      pivots[g] = next == kScaledFromElement ? element_of(g) * Limits<A>::kScale : moments.mean;
      passes[g] = next;
    }
    return next;
  }
};

// grid: the tiles of each slab of each sample.
template <typename Op>
__global__ void __launch_bounds__(kNhwcThreads, kNhwcForwardCtas)
    group_norm_nhwc_moments_kernel(const __grid_constant__ GroupNormForwardArgs args,
                                   const __grid_constant__ GroupNormNhwcSteps steps) {
  using A = typename Op::A;
  using Slab = NhwcMoments<Op>;
  extern __shared__ uint4 dynamic[];
  __shared__ int next_of_warps[kNhwcThreads / kWarpSize];
  const NhwcPlace<Op> place(args, steps, blockIdx.x);
  auto* const pivots = reinterpret_cast<A*>(dynamic);
  auto* const passes = reinterpret_cast<int*>(pivots + steps.tile_groups);
  auto* const room = dynamic + nhwc_vectors((sizeof(A) + sizeof(int)) * steps.tile_groups);
  const Slab slab{args,   steps,
                  place,  steps.group_channels % Op::N == 0,
                  room,   reinterpret_cast<typename Slab::Sums*>(room),
                  pivots, passes};
  await_kernels_before();
  for (int g = static_cast<int>(threadIdx.x); g < steps.tile_groups; g += blockDim.x) {
    slab.pivots[g] = slab.element_of(g);
    slab.passes[g] = kFromElement;
  }
  __syncthreads();
  int pass = kFromElement;
#pragma unroll 1
  while (pass < kNoPass) {
    slab.add(pass < kScaledFromElement ? A(1) : Limits<A>::kScale);
    __syncthreads();
    int next = kNoPass;
#pragma unroll 1
    for (int g = warp_of_cta(); g < steps.tile_groups; g += warps_of_cta()) {
      next = min(next, slab.passes[g] == pass ? slab.finish(g, pass) : slab.passes[g]);
    }
    if (lane_of_warp() == 0) {
      next_of_warps[warp_of_cta()] = next;
    }
    __syncthreads();
    pass = kNoPass;
    for (int warp = 0; warp < warps_of_cta(); ++warp) {
      pass = min(pass, next_of_warps[warp]);
    }
  }
}

// The moments of a group, from those of its slabs in shared memory, and the scale of its elements.
// All threads of the CTA call it.
template <typename A>
__device__ __forceinline__ Moments<A> merge_slabs(WarpMoments<A>* slabs, int count, A elements,
                                                  A& scale) {
  const A inverse = reciprocal(elements);
  bool has_scale = false;
  for (int k = lane_of_warp(); k < count; k += kWarpSize) {
    has_scale |= slabs[k].count < A(0);
  }
  scale = 1;
  if (!__any_sync(kAllLanes, has_scale)) {
    const Moments<A> moments = merge_parts<true, kNhwcSlabs>(slabs, count, inverse);
    if (!overflowed(moments)) {
      return moments;
    }
  }
  scale = Limits<A>::kScale;
  __syncthreads();
  for (int k = static_cast<int>(threadIdx.x); k < count; k += blockDim.x) {
    const WarpMoments<A> slab = slabs[k];
    const A its_scale = slab.count < A(0) ? A(1) : scale;
    slabs[k] = {abs(slab.count),
                {slab.moments.mean * its_scale, slab.moments.rest * its_scale,
                 slab.moments.second * its_scale * its_scale}};
  }
  __syncthreads();
  Moments<A> moments = merge_parts<true, kNhwcSlabs>(slabs, count, inverse);
  unscale(moments, scale);
  return moments;
}

// grid: the groups of all samples.
template <typename A>
__global__ void __launch_bounds__(kNhwcGroupThreads)
    group_norm_nhwc_channels_kernel(const __grid_constant__ GroupNormForwardArgs args, int slabs) {
  __shared__ WarpMoments<A> parts[kNhwcSlabs];
  const std::int64_t group = blockIdx.x;
  const std::int64_t sample = group / args.groups;
  const int channels = static_cast<int>(args.group_channels());
  const std::int64_t first = (group - sample * args.groups) * channels;
  await_kernels_before();
  for (int k = static_cast<int>(threadIdx.x); k < slabs; k += blockDim.x) {
    parts[k] = nhwc_slabs<A>(args)[group * slabs + k];
  }
  __syncthreads();
  const A elements = static_cast<A>(channels) * static_cast<A>(args.pixels);
  A scale;
  const Moments<A> moments = merge_slabs(parts, slabs, elements, scale);
  const Normalizer<A> normalizer =
      LayerNorm::normalizer(moments, scale, reciprocal(elements), static_cast<A>(args.eps));
  if (args.stats != nullptr && threadIdx.x == 0) {
    LayerNorm::save(normalizer, moments, static_cast<A*>(args.stats), group,
                    args.samples * args.groups);
  }
  for (std::int64_t c = first + threadIdx.x; c < first + channels; c += blockDim.x) {
    const ChannelMap<A> map = map_of<A>(args.channel, sample, c);
    const std::int64_t entry = sample * args.channels + c;
    nhwc_row<A>(args, kNhwcScale)[entry] = normalizer.scale;
    nhwc_row<A>(args, kNhwcMean)[entry] = normalizer.mean;
    nhwc_row<A>(args, kNhwcFactor)[entry] = normalizer.rstd * map.factor;
    nhwc_row<A>(args, kNhwcOffset)[entry] = multiply_add(normalizer.shift, map.factor, map.offset);
  }
}

// grid: the tiles of each of its own slabs of each sample.
template <typename Op>
__global__ void __launch_bounds__(kNhwcThreads, kNhwcForwardCtas)
    group_norm_nhwc_forward_kernel(const __grid_constant__ GroupNormForwardArgs args,
                                   const __grid_constant__ GroupNormNhwcSteps steps) {
  using A = typename Op::A;
  using E = typename Op::E;
  constexpr int N = Op::N;
  extern __shared__ uint4 dynamic[];
  const NhwcPlace<Op> place(args, steps, last_block_first());
  await_kernels_before();
  if (place.pixels == 0) {
    return;
  }
  const std::int64_t channels =
      place.sample * args.channels + std::int64_t{place.group} * steps.group_channels;
  A scales[N], means[N], factors[N], offsets[N];
  place.read(nhwc_row<A>(args, kNhwcScale) + channels, scales);
  place.read(nhwc_row<A>(args, kNhwcMean) + channels, means);
  place.read(nhwc_row<A>(args, kNhwcFactor) + channels, factors);
  place.read(nhwc_row<A>(args, kNhwcOffset) + channels, offsets);
  bool has_scale = false;  // it is read again, so that it takes no registers
#pragma unroll
  for (int j = 0; j < N; ++j) {
    has_scale |= scales[j] != A(1);
  }
  place.walk({args.input}, dynamic, [&](const auto& packs, std::int64_t element) {
    A values[N];
    to_values(packs[0], values);
    if (has_scale) {
      A again[N];
      place.read(nhwc_row<A>(args, kNhwcScale) + channels, again);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        values[j] *= again[j];
      }
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const A n = multiply_add(values[j] - means[j], factors[j], offsets[j]);
      values[j] = Op::kSilu ? silu<E>(n).value : n;
    }
    store_bytes_if<sizeof(E) * N>(true, static_cast<E*>(args.output) + element,
                                  rounded<E>(values).words);
  });
}

}  // namespace fused_op::cuda
