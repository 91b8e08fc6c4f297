// Forward of norms over channels (core/channels_first.h). A lane has the same few pixels in many
// channels, so a warp reads neighbouring pixels. The sums of a pixel are added up in a lane and
// then over a few warps. Compiled by NVRTC; torch-free.
#pragma once

#include "cuda/dependent_launch.cuh"
#include "cuda/forward_channels_tile.cuh"

namespace fused_op::cuda {

// Forward of a tile. A kernel either keeps the tile in registers or reads it again for each pass.
template <typename Op, bool kKept>
struct ChannelsFirstForward {
  using A = typename Op::A;
  using E = typename Op::E;
  using Norm = typename Op::Norm;
  enum Values { kOfSquares, kOfDeviations, kOfMean };  // the first two are added at once
  using Sums = WarpSums<Op, Norm::kCentered ? 3 : 1>;
  static constexpr int N = Op::N;

  const ChannelsFirstForwardArgs& args;
  const PixelPlace<Op>& place;
  Channels<Op, kKept>& x;
  const Sums& sums;
  const ChannelMap<A>* kept_maps;  // of this warp, if the tile is kept

  // Finds the moments of each pixel as moments_of_lanes() of forward_rows.cuh does.
  __device__ __forceinline__ void find_moments(A scale, bool refined,
                                               Moments<A> (&moments)[N]) const {
    const A inverse = reciprocal(static_cast<A>(place.channels));
#pragma unroll
    for (int j = 0; j < N; ++j) {
      moments[j] = {};
    }
    if constexpr (Norm::kCentered) {
      add_mean(scale, inverse, moments);
      if (refined) {
        Sums::barrier(place);
        add_mean(scale, inverse, moments);
      }
    }
    constexpr int kValues = Norm::kCentered ? 2 : 1;
    x.stay_packed();
    A totals[kValues][N] = {};
    add_channels<Op, kKept>(place, totals, [&](int i, A(&parts)[kValues][N]) {
      A values[N];
      x.get(i, values);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const A deviation = multiply_add(values[j], scale, -moments[j].mean);
        parts[0][j] = multiply_add(deviation, deviation, parts[0][j]);
        if constexpr (Norm::kCentered) {
          parts[1][j] += deviation;
        }
      }
    });
    sums.template add<kOfSquares>(place, totals);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      moments[j].second = totals[0][j];
      if constexpr (Norm::kCentered) {
        moments[j].rest = totals[1][j] * inverse;
        moments[j].second -= totals[1][j] * moments[j].rest;
      }
    }
  }
  __device__ __forceinline__ void add_mean(A scale, A inverse, Moments<A> (&moments)[N]) const {
    A totals[1][N] = {};
    add_channels<Op, kKept>(place, totals, [&](int i, A(&parts)[1][N]) {
      A values[N];
      x.get(i, values);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        parts[0][j] += multiply_add(values[j], scale, -moments[j].mean);
      }
    });
    sums.template add<kOfMean>(place, totals);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      moments[j].mean += totals[0][j] * inverse;
    }
  }

  // Whether all moments of this lane are trusted(). This holds in lanes past the last pixel, whose
  // elements are zeros.
  __device__ __forceinline__ bool trusts(const Moments<A> (&moments)[N]) const {
    bool all = true;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      all = all && trusted(moments[j], static_cast<A>(place.channels));
    }
    return all;
  }

  __device__ __forceinline__ void write(Moments<A> (&moments)[N], A (&scales)[N]) const {
    const A inverse = reciprocal(static_cast<A>(place.channels));
    Normalizer<A> normalizers[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      unscale(moments[j], scales[j]);
      normalizers[j] = Norm::normalizer(moments[j], scales[j], inverse, static_cast<A>(args.eps));
      if (args.stats != nullptr && place.warp == 0 && place.live) {
        Norm::save(normalizers[j], moments[j], static_cast<A*>(args.stats), place.row() + j,
                   args.rows);
      }
    }
    const ChannelParameters<Op> parameters(args);
    const PixelPlace<Op> target = place.again();
    x.stay_packed();
    for_channels<Op, kKept>(place, [&](int i) {
      const ChannelMap<A> map = kKept ? kept_maps[i] : parameters.map(place.channel(i));
      A values[N];
      x.get(i, values);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const A xhat = Norm::normalized(values[j], normalizers[j]);
        const A n = multiply_add(xhat, map.factor, map.offset);
        values[j] = Op::kSilu ? silu<E>(n).value : n;
      }
      store_bytes_if<sizeof(E) * N>(place.live,
                                    static_cast<E*>(args.output.data) + target.element(i),
                                    rounded<E>(values).words);
    });
  }
};

// Finishes a group with pixels whose moments are not trusted(). Only these pixels get new moments:
// with a refined mean, and if the squares overflowed, of elements times Limits::kScale. It is a
// function of its own so that the common path pays no registers for it.
template <typename Op>
__device__ __noinline__ void finish_untrusted_pixels(
    const ChannelsFirstForwardArgs& args, typename ChannelsFirstForward<Op, false>::Sums sums) {
  using Forward = ChannelsFirstForward<Op, false>;
  using A = typename Op::A;
  constexpr int N = Op::N;
  const PixelPlace<Op> place(args);
  Channels<Op, false> x(args.input.data, place);
  const Forward forward{args, place, x, sums, nullptr};
  Moments<A> moments[N];
  A scales[N];
  Forward::Sums::barrier(place);  // all have read the sums
  forward.find_moments(A(1), false, moments);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    scales[j] = A(1);
  }
#pragma unroll 1
  for (int attempt = 0; attempt < 2; ++attempt) {
    const A scale = attempt == 0 ? A(1) : Limits<A>::kScale;
    Moments<A> refined[N];
    Forward::Sums::barrier(place);
    forward.find_moments(scale, true, refined);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const bool again = attempt == 0 ? !trusted(moments[j], static_cast<A>(place.channels))
                                      : overflowed(moments[j]);
      if (again) {
        moments[j] = refined[j];
        scales[j] = scale;
      }
    }
  }
  forward.write(moments, scales);
}

// grid: enough CTAs for one group of threads a tile; block: (kWarpSize, kWarps, kGroups).
template <typename Op>
__global__ void __launch_bounds__(Op::kThreads, Op::kCtasPerSm)
    channels_first_forward_kernel(const __grid_constant__ ChannelsFirstForwardArgs args) {
  using A = typename Op::A;
  using Forward = ChannelsFirstForward<Op, Op::kKept>;
  __shared__ typename Forward::Sums::Shared shared;
  alignas(16) __shared__ ChannelMap<A> maps[Op::kWarps][Op::kKept ? Op::kEach : 1];
  const PixelPlace<Op> place(args);
  await_kernels_before();
  Channels<Op, Op::kKept> x(args.input.data, place);
  if constexpr (Op::kKept) {
    keep_maps<Op>(args, maps);
  }
  const typename Forward::Sums sums{shared};
  const Forward forward{args, place, x, sums, maps[place.warp]};
  Moments<A> moments[Op::N];
  forward.find_moments(A(1), false, moments);
  // Every warp of a group decides the same, because all have the same moments.
  if (__any_sync(kAllLanes, !forward.trusts(moments))) {
    finish_untrusted_pixels<Op>(args, {shared});
    return;
  }
  A scales[Op::N];
#pragma unroll
  for (int j = 0; j < Op::N; ++j) {
    scales[j] = A(1);
  }
  forward.write(moments, scales);
}

}  // namespace fused_op::cuda
