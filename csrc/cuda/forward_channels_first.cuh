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
  static constexpr int kValues = Norm::kCentered ? 2 : 1;
  using Sums = WarpSums<Op, kValues>;
  static constexpr int N = Op::N;

  const ChannelsFirstForwardArgs& args;
  const PixelPlace<Op>& place;
  Channels<Op, kKept>& x;
  const Sums& sums;
  const ChannelMap<A>* kept_maps;  // of this warp, if the tile is kept

  // Finds the moments of each pixel, of elements times `scale`. Channels are seen once, as
  // deviations from the first one; and again, from the mean, by a group with a pixel whose first
  // channel is too far from it: see moments_of(). No other pixel changes.
  __device__ __forceinline__ void find_moments(A scale, Moments<A> (&moments)[N]) const {
    A from[N] = {};
    if constexpr (Norm::kCentered) {
      x.get_first(from);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        from[j] *= scale;
      }
    }
    if (unsigned far = add_deviations(scale, from, moments); __any_sync(kAllLanes, far != 0)) {
      Moments<A> found[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        from[j] = moments[j].mean;
      }
      Sums::barrier(place);  // all have read the sums
      x.stay_packed();
      add_deviations(scale, from, found);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        moments[j] = (far >> j & 1) != 0 ? found[j] : moments[j];
      }
    }
  }
  // Returns one bit for each pixel, set if the mean has to take the place of `from`.
  __device__ __forceinline__ unsigned add_deviations(A scale, const A (&from)[N],
                                                     Moments<A> (&moments)[N]) const {
    A totals[kValues][N] = {};
    add_channels<Op, kKept>(place, totals, [&](int i, A(&parts)[kValues][N]) {
      A values[N];
      x.get(i, values);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const A deviation = multiply_add(values[j], scale, -from[j]);
        parts[0][j] = multiply_add(deviation, deviation, parts[0][j]);
        if constexpr (Norm::kCentered) {
          parts[1][j] += deviation;
        }
      }
    });
    sums.add(place, totals);
    unsigned far = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if constexpr (Norm::kCentered) {
        const A inverse = reciprocal(static_cast<A>(place.channels));
        const A of_pixel[2] = {totals[1][j], totals[0][j]};
        far |= static_cast<unsigned>(!moments_of(of_pixel, from[j], inverse, moments[j])) << j;
      } else {
        moments[j] = {A(0), A(0), totals[0][j]};
      }
    }
    return far;
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

// Finishes a group with pixels whose squares overflowed. They alone get new moments, of elements
// times Limits::kScale. It is a function of its own so that the common path pays no registers for
// it.
template <typename Op>
__device__ __noinline__ void finish_overflowed_pixels(
    const ChannelsFirstForwardArgs& args, typename ChannelsFirstForward<Op, false>::Sums sums) {
  using Forward = ChannelsFirstForward<Op, false>;
  using A = typename Op::A;
  constexpr int N = Op::N;
  const PixelPlace<Op> place(args);
  Channels<Op, false> x(args.input.data, place);
  const Forward forward{args, place, x, sums, nullptr};
  Moments<A> moments[N], scaled[N];
  A scales[N];
  Forward::Sums::barrier(place);  // all have read the sums
  forward.find_moments(A(1), moments);
  Forward::Sums::barrier(place);
  forward.find_moments(Limits<A>::kScale, scaled);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const bool again = overflowed(moments[j]);
    moments[j] = again ? scaled[j] : moments[j];
    scales[j] = again ? Limits<A>::kScale : A(1);
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
  A scales[Op::N];
  bool overflow = false;
  forward.find_moments(A(1), moments);
#pragma unroll
  for (int j = 0; j < Op::N; ++j) {
    scales[j] = A(1);
    overflow = overflow || overflowed(moments[j]);
  }
  // Every warp of a group decides the same, because all have the same moments.
  if (__any_sync(kAllLanes, overflow)) {
    finish_overflowed_pixels<Op>(args, {shared});
    return;
  }
  forward.write(moments, scales);
}

}  // namespace fused_op::cuda
