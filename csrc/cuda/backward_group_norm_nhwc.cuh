// Backward of the group norm of images whose channels are neighbours: group_norm_nhwc.h. The sums
// of channels in each slab are also those that group_norm_sums_kernel adds up. Compiled by NVRTC;
// torch-free.
#pragma once

#include "cuda/backward_group_norm.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/group_norm_nhwc.cuh"

namespace fused_op::cuda {

// The sums of each slab, [samples, channels, slabs].
template <typename A>
__device__ __forceinline__ PlaneSums<A>* nhwc_sums(const GroupNormBackwardArgs& args) {
  return static_cast<PlaneSums<A>*>(args.workspace);
}
// Behind them, what the second kernel leaves of each channel: rows of NhwcRow,
// [samples, channels] each.
template <typename A>
__device__ __forceinline__ A* nhwc_row(const GroupNormBackwardArgs& args, int slabs, NhwcRow row) {
  const std::int64_t entries = args.samples * args.channels;
  return reinterpret_cast<A*>(nhwc_sums<A>(args) + entries * slabs) + row * entries;
}

template <typename A>
__device__ __forceinline__ Normalizer<A> nhwc_normalizer(const GroupNormBackwardArgs& args,
                                                         std::int64_t group) {
  return LayerNorm::saved(static_cast<const A*>(args.stats), group, args.samples * args.groups)
      .normalizer();
}

// Of a thread's channels: what turns elements into x̂ and dn. read(row, values) reads some numbers.
template <typename Op, typename Read>
struct NhwcGradient {
  using A = typename Op::A;
  static constexpr int N = Op::N;
  const Read& read;
  bool has_scale = false;  // the scale is read again, so that it takes no registers
  A means[N], rstds[N], factors[N], offsets[N];

  __device__ __forceinline__ explicit NhwcGradient(const Read& its_read) : read(its_read) {
    A scales[N];
    read(kNhwcScale, scales);
    read(kNhwcMean, means);
    read(kNhwcRstd, rstds);
    read(kNhwcFactor, factors);
    read(kNhwcOffset, offsets);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      has_scale |= scales[j] != A(1);
    }
  }

  template <typename Packs>
  __device__ __forceinline__ void take(const Packs (&packs)[2], A (&xhat)[N], A (&dn)[N]) const {
    to_values(packs[0], xhat);
    to_values(packs[1], dn);
    if (has_scale) {
      A scales[N];
      read(kNhwcScale, scales);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        xhat[j] *= scales[j];
      }
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      xhat[j] = (xhat[j] - means[j]) * rstds[j];
      if constexpr (Op::kSilu) {
        dn[j] *= silu<typename Op::E>(multiply_add(xhat[j], factors[j], offsets[j])).slope;
      }
    }
  }
};

// grid: the tiles of each slab of each sample.
template <typename Op>
__global__ void __launch_bounds__(kNhwcThreads, kNhwcBackwardCtas)
    group_norm_nhwc_sums_kernel(const __grid_constant__ GroupNormBackwardArgs args,
                                const __grid_constant__ GroupNormNhwcSteps steps) {
  using A = typename Op::A;
  constexpr int N = Op::N;
  extern __shared__ uint4 dynamic[];
  const int channels = steps.tile_groups * steps.group_channels;
  auto* const rows =
      reinterpret_cast<A*>(dynamic);  // the first ones of NhwcRow, [tile channels] each
  auto* const room = dynamic + nhwc_vectors(sizeof(A) * kNhwcSumsRows * channels);
  auto* const sums = reinterpret_cast<PlaneSums<A>*>(room);  // afterwards
  const NhwcPlace<Op> place(args, steps, blockIdx.x);
  const std::int64_t first_channel = std::int64_t{place.group} * steps.group_channels;
  await_kernels_before();
  for (int c = static_cast<int>(threadIdx.x); c < channels; c += blockDim.x) {
    const Normalizer<A> normalizer = nhwc_normalizer<A>(
        args, place.sample * steps.groups + place.group + c / steps.group_channels);
    const ChannelMap<A> map = map_of<A>(args.channel, place.sample, first_channel + c);
    rows[kNhwcScale * channels + c] = normalizer.scale;
    rows[kNhwcMean * channels + c] = normalizer.mean;
    rows[kNhwcRstd * channels + c] = normalizer.rstd;
    rows[kNhwcFactor * channels + c] = map.factor;
    rows[kNhwcOffset * channels + c] = map.offset;
  }
  __syncthreads();
  const auto read = [&](NhwcRow row, A(&values)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      values[j] = rows[row * channels + place.channel + j];
    }
  };
  const NhwcGradient<Op, decltype(read)> gradient(read);
  PlaneSums<A> own[N] = {};
  place.walk({args.input, args.grad_output}, room, [&](const auto& packs, std::int64_t) {
    A xhat[N], dn[N];
    gradient.take(packs, xhat, dn);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      own[j].dn += dn[j];
      own[j].dn_xhat = multiply_add(dn[j], xhat[j], own[j].dn_xhat);
    }
  });
  __syncthreads();  // no pixel is on its way
  if (place.row < place.rows) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      sums[(place.channel + j) * place.rows + place.row] = own[j];
    }
  }
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < channels; c += blockDim.x) {
    PlaneSums<A> total = sums[c * place.rows];
#pragma unroll 4
    for (int row = 1; row < place.rows; ++row) {
      total.dn += sums[c * place.rows + row].dn;
      total.dn_xhat += sums[c * place.rows + row].dn_xhat;
    }
    const std::int64_t channel = place.sample * args.channels + first_channel + c;
    nhwc_sums<A>(args)[channel * steps.slabs + place.slab] = total;
  }
}

// grid: the groups of all samples.
template <typename A>
__global__ void __launch_bounds__(kNhwcGroupThreads)
    group_norm_nhwc_gradients_kernel(const __grid_constant__ GroupNormBackwardArgs args,
                                     int slabs) {
  __shared__ A factors[kNhwcMostBytes / sizeof(A)];
  __shared__ PullbackSums<A> of_warps[kNhwcGroupThreads / kWarpSize];
  const std::int64_t group = blockIdx.x;
  const std::int64_t sample = group / args.groups;
  const int channels = static_cast<int>(args.group_channels());
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t first = (group - sample * args.groups) * channels;
  const std::int64_t entry = sample * args.channels + first;
  await_kernels_before();
  const Normalizer<A> normalizer = nhwc_normalizer<A>(args, group);
  const auto put = [&](NhwcRow row, int c, A value) {
    nhwc_row<A>(args, slabs, row)[entry + c] = value;
  };
  for (int c = thread; c < channels; c += kNhwcGroupThreads) {
    const ChannelMap<A> map = map_of<A>(args.channel, sample, first + c);
    factors[c] = map.factor;
    put(kNhwcScale, c, normalizer.scale);
    put(kNhwcMean, c, normalizer.mean);
    put(kNhwcRstd, c, normalizer.rstd);
    put(kNhwcFactor, c, map.factor);
    put(kNhwcOffset, c, map.offset);
  }
  __syncthreads();
  const PlaneSums<A>* const sums = nhwc_sums<A>(args) + entry * slabs;
  A totals[2] = {};
#pragma unroll 4
  for (int k = thread; k < channels * slabs; k += kNhwcGroupThreads) {
    const PlaneSums<A> slab = sums[k];
    totals[0] = multiply_add(factors[k / slabs], slab.dn_xhat, totals[0]);
    totals[1] = multiply_add(factors[k / slabs], slab.dn, totals[1]);
  }
  lane_sums<kWarpSize>(totals);
  if (lane_of_warp() == 0) {
    of_warps[warp_of_cta()] = {totals[0], totals[1]};
  }
  __syncthreads();
  const A inverse = reciprocal(static_cast<A>(channels) * static_cast<A>(args.pixels));
  const Pullback<LayerNorm, A> pullback(sums_of_slots(of_warps, warps_of_cta()), normalizer,
                                        inverse);
  for (int c = thread; c < channels; c += kNhwcGroupThreads) {
    put(kNhwcMeanWdy, c, pullback.mean_wdy);
    put(kNhwcAlongXhat, c, pullback.along_xhat);
  }
}

// grid: the tiles of each of its own slabs of each sample.
template <typename Op>
__global__ void __launch_bounds__(kNhwcThreads, kNhwcBackwardCtas)
    group_norm_nhwc_backward_kernel(const __grid_constant__ GroupNormBackwardArgs args,
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
  const auto read = [&](NhwcRow row, A(&values)[N]) {
    place.read(nhwc_row<A>(args, steps.sum_slabs, row) + channels, values);
  };
  const NhwcGradient<Op, decltype(read)> gradient(read);
  A means[N], along[N];
  read(kNhwcMeanWdy, means);
  read(kNhwcAlongXhat, along);
  place.walk({args.input, args.grad_output}, dynamic, [&](const auto& packs, std::int64_t element) {
    A xhat[N], dn[N], scales[N];
    gradient.take(packs, xhat, dn);
    if (gradient.has_scale) {
      read(kNhwcScale, scales);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const A rstd = gradient.has_scale ? gradient.rstds[j] * scales[j] : gradient.rstds[j];
      const A centered = dn[j] * gradient.factors[j] - means[j];
      dn[j] = multiply_add(-xhat[j], along[j], centered * rstd);
    }
    store_bytes_if<sizeof(E) * N>(true, static_cast<E*>(args.grad_input) + element,
                                  rounded<E>(dn).words);
  });
}

}  // namespace fused_op::cuda
