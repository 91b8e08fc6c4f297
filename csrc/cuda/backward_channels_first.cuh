// Backward of norms over channels. As in forward, lanes take pixels and warps take channels. A
// group processes many tiles one after another and writes one row of partial sums of the
// parameters' gradients, which add_partials_kernel adds up. Compiled by NVRTC; torch-free.
#pragma once

#include "cuda/backward_tile.h"
#include "cuda/channels_first.cuh"
#include "cuda/dependent_launch.cuh"

namespace fused_op::cuda {

// Sums each of kCount values, a power of two up to 32, over the lanes of a warp. Lane k · 32/kCount
// and those behind it return the sum of value k. Each step halves the number of values that a lane
// holds, so there is about one shuffle per value.
template <int kCount, int kOffset = kWarpSize / 2, typename A, int kSize>
__device__ __forceinline__ A sum_over_lanes(A (&values)[kSize], int lane) {
  if constexpr (kOffset == 0) {
    return values[0];
  } else if constexpr (kCount == 1) {
    values[0] += __shfl_xor_sync(kAllLanes, values[0], kOffset);
    return sum_over_lanes<1, kOffset / 2>(values, lane);
  } else {
    constexpr int kHalf = kCount / 2;
    const bool upper = (lane & kOffset) != 0;
#pragma unroll
    for (int k = 0; k < kHalf; ++k) {
      const A mine = upper ? values[k + kHalf] : values[k];
      const A theirs = upper ? values[k] : values[k + kHalf];
      values[k] = mine + __shfl_xor_sync(kAllLanes, theirs, kOffset);
    }
    return sum_over_lanes<kHalf, kOffset / 2>(values, lane);
  }
}

// Adds the sums of a warp's channels over pixels to the group's row of partial sums. A lane writes
// the same channels in every tile, and no other thread reads or writes them.
template <typename Op>
struct ChannelSums {
  using A = typename Op::A;
  static constexpr int kAtOnce = 8;  // channels
  static constexpr int kCount = 2 * kAtOnce;

  const PixelPlace<Op>& place;
  A* partials;  // [2, partials_stride(channels)] of the group
  bool adds;    // to the sums of earlier tiles; false for the first tile

  // `values` are this lane's sums for channels i, i + 1, ..: those for the weight, then those for
  // the bias.
  __device__ __forceinline__ void put(int i, A (&values)[kCount]) const {
    const A total = sum_over_lanes<kCount>(values, place.lane);
    const int value = place.lane / (kWarpSize / kCount);
    const int number = i + value % kAtOnce;
    if (place.lane % (kWarpSize / kCount) == 0 && number < place.count() && place.has(number)) {
      A* const target =
          partials + (value / kAtOnce) * partials_stride(place.channels) + place.channel(number);
      *target = adds ? *target + total : total;
    }
  }
  // Clears the columns behind the last channel, which add_partials_kernel reads too. One warp does
  // so, once.
  __device__ __forceinline__ void clear_padding() const {
    const std::int64_t stride = partials_stride(place.channels);
    const std::int64_t column = place.channels + place.lane;
    if (place.warp == 0 && column < stride) {
      partials[column] = partials[stride + column] = A(0);
    }
  }
};

template <typename Op>
struct ChannelsFirstBackward {
  using A = typename Op::A;
  using E = typename Op::E;
  using Norm = typename Op::Norm;
  using Sums = WarpSums<Op, 2>;
  static constexpr int N = Op::N;

  const ChannelsFirstBackwardArgs& args;
  const PixelPlace<Op>& place;
  const ChannelParameters<Op>& parameters;
  const Channels<Op, Op::kKept>& x;
  const Channels<Op, Op::kKept>& dy;
  Normalizer<A> normalizers[N];

  __device__ __forceinline__ void find_normalizers() {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      normalizers[j] = {A(1), A(0), A(0), A(0)};
      if (place.live) {
        normalizers[j] =
            Norm::saved(static_cast<const A*>(args.stats), place.row + j, args.rows).normalizer();
      }
    }
  }

  // x̂ of channel i, and dn, the gradient with respect to the norm's output.
  __device__ __forceinline__ void normalize(int i, A weight, A (&xhat)[N], A (&dn)[N]) const {
    x.get(i, xhat);
    dy.get(i, dn);
    const A bias = Op::kSilu ? parameters.bias(place.channel(i)) : A(0);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      xhat[j] = Norm::normalized(xhat[j], normalizers[j]);
      if constexpr (Op::kSilu) {
        dn[j] *= activation<false>(multiply_add(xhat[j], weight, bias)).slope;
      }
    }
  }

  // Adds up the two sums of each pixel, and also those of each channel if `leaves`.
  __device__ __forceinline__ void add_up(const Sums& sums, const ChannelSums<Op>& channel_sums,
                                         bool leaves, A (&totals)[2][N]) const {
    constexpr int kAtOnce = ChannelSums<Op>::kAtOnce;
    static_assert(kFoldedChannels % kAtOnce == 0);
    A waiting[ChannelSums<Op>::kCount] = {};
    add_channels<Op, Op::kKept>(place, totals, [&](int i, A(&parts)[2][N]) {
      const A weight = parameters.weight(place.channel(i));
      A xhat[N], dn[N];
      normalize(i, weight, xhat, dn);
      A of_weight = 0;
      A of_bias = 0;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        of_weight = multiply_add(dn[j], xhat[j], of_weight);
        of_bias += dn[j];
        const A wdy = dn[j] * weight;
        parts[0][j] = multiply_add(wdy, xhat[j], parts[0][j]);
        parts[1][j] += wdy;
      }
      if (leaves) {
        leave(channel_sums, i, of_weight, of_bias, waiting);
      }
    });
    sums.add(place, totals);
  }
  // Collects the sums of kAtOnce channels and then puts them together. All lanes of a warp have the
  // same channels, so they come here together.
  __device__ __forceinline__ void leave(const ChannelSums<Op>& channel_sums, int i, A of_weight,
                                        A of_bias, A (&waiting)[ChannelSums<Op>::kCount]) const {
    constexpr int kAtOnce = ChannelSums<Op>::kAtOnce;
    // Constant indices keep `waiting` in registers.
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      waiting[k] = i % kAtOnce == k ? of_weight : waiting[k];
      waiting[k + kAtOnce] = i % kAtOnce == k ? of_bias : waiting[k + kAtOnce];
    }
    const bool is_last = i + 1 == place.count() || !place.has(i + 1);
    if (i % kAtOnce == kAtOnce - 1 || is_last) {
      channel_sums.put(i - i % kAtOnce, waiting);
    }
  }

  __device__ __forceinline__ void write(const A (&totals)[2][N]) const {
    const A inverse = reciprocal(static_cast<A>(place.channels));
    const PixelPlace<Op> target = place.again();
    for_channels<Op, Op::kKept>(place, [&](int i) {
      const A weight = parameters.weight(place.channel(i));
      A xhat[N], dn[N];
      normalize(i, weight, xhat, dn);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const Pullback<Norm, A> pullback({totals[0][j], totals[1][j]}, normalizers[j], inverse);
        xhat[j] = pullback(dn[j] * weight, xhat[j]);
      }
      if (place.live) {
        store_bytes<sizeof(E) * N>(static_cast<E*>(args.grad_input.data) + target.element(i),
                                   rounded<E>(xhat).words);
      }
    });
  }
};

// grid and block are as in forward, but there may be fewer groups than tiles. partials: null, or
// [groups, 2, partials_stride(channels)].
template <typename Op>
__global__ void __launch_bounds__(Op::kThreads, 512 / Op::kThreads)
    channels_first_backward_kernel(const __grid_constant__ ChannelsFirstBackwardArgs args,
                                   const std::int64_t tiles, typename Op::A* partials) {
  using A = typename Op::A;
  using W = typename Op::W;
  using Backward = ChannelsFirstBackward<Op>;
  __shared__ typename Backward::Sums::Shared shared;
  const typename Backward::Sums sums{shared};
  const std::int64_t groups = static_cast<std::int64_t>(gridDim.x) * Op::kGroups;
  const std::int64_t group =
      static_cast<std::int64_t>(blockIdx.x) * Op::kGroups + static_cast<int>(threadIdx.z);
  const ChannelParameters<Op> parameters{static_cast<const W*>(args.weight),
                                         static_cast<const W*>(args.bias)};
  await_kernels_before();
  // A group without a tile writes zeros.
#pragma unroll 1
  for (std::int64_t number = group; number == group || number < tiles; number += groups) {
    const PixelPlace<Op> place(number, tiles, args.cols, args.pixels);
    const Channels<Op, Op::kKept> x(args.x.data, place);
    const Channels<Op, Op::kKept> dy(args.grad_output.data, place);
    Backward backward{args, place, parameters, x, dy, {}};
    backward.find_normalizers();
    const std::int64_t row = 2 * partials_stride(place.channels);
    const ChannelSums<Op> channel_sums{place, partials + group * row, number != group};
    if (partials != nullptr && number == group) {
      channel_sums.clear_padding();
    }
    A totals[2][Op::N] = {};
    backward.add_up(sums, channel_sums, partials != nullptr, totals);
    if (args.grad_input.data != nullptr) {
      backward.write(totals);
    }
  }
}

}  // namespace fused_op::cuda
