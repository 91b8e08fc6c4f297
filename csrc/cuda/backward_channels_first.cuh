// Backward of norms over channels. A CTA writes one row of partial sums of the parameters'
// gradients, which add_partials_kernel adds up. Compiled by NVRTC; torch-free.
#pragma once

#include "cuda/backward_tile.h"
#include "cuda/channel_parameters.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/staged_tile.cuh"

namespace fused_op::cuda {

// Weight and bias of a channel. If a whole tile is in shared memory, so are they; in their own
// type, as more bytes would cost some calls a CTA of each SM: share of add 0.20, and as
// accumulators 0.16, at 64x1536x49 (H200, bf16).
template <typename Op>
struct TileParameters {
  using A = typename Op::A;
  using W = typename Op::W;

  const ChannelParameters<Op> given;
  W* kept;  // weights, and then biases
  std::int64_t slots;

  __device__ __forceinline__ TileParameters(const ChannelsFirstBackwardArgs& args, void* shared)
      : given(args), kept(static_cast<W*>(shared)), slots(channel_slots(args.cols, Op::kSlices)) {
    if constexpr (Op::kWhole) {
#pragma unroll 1
      for (std::int64_t channel = threadIdx.x; channel < slots; channel += Op::kThreads) {
        const bool exists = channel < args.cols;
        store_value(kept + channel, given.weight(channel, exists));
        if constexpr (Op::kSilu) {
          store_value(kept + slots + channel, given.bias(channel, exists));
        }
      }
    }
  }
  __device__ __forceinline__ A weight(std::int64_t channel, bool exists) const {
    return Op::kWhole ? of_kept(kept + channel) : given.weight(channel, exists);
  }
  __device__ __forceinline__ A bias(std::int64_t channel, bool exists) const {
    if constexpr (!Op::kSilu) {
      return A(0);
    } else {
      return Op::kWhole ? of_kept(kept + slots + channel) : given.bias(channel, exists);
    }
  }

 private:
  __device__ __forceinline__ static A of_kept(const W* place) {
    Pack<W, 1> pack;
    if constexpr (sizeof(W) == 2) {
      pack.words[0] = *reinterpret_cast<const std::uint16_t*>(place);  // memcpy() takes two loads
    } else {
      pack = *reinterpret_cast<const Pack<W, 1>*>(place);
    }
    A values[1];
    to_values(pack, values);
    return values[0];
  }
};

// The sums of each channel over the pixels of a CTA's tiles, [2, partials_stride(channels)].
template <typename Op>
struct ChannelSums {
  using A = typename Op::A;

  A* sums;  // in shared memory if a whole tile is there, else in the workspace
  std::int64_t stride;

  __device__ __forceinline__ void clear() const {
    for (std::int64_t i = threadIdx.x; i < 2 * stride; i += Op::kThreads) {
      sums[i] = A(0);
    }
    __syncthreads();
  }
  // `values` are a thread's sums over its pixels of this channel: those for the weight and for the
  // bias. All lanes of a warp call it together. No two threads add to the same sum.
  __device__ __forceinline__ void add(const PixelThread<Op>& thread, std::int64_t channel,
                                      bool exists, A (&values)[2]) const {
    sum_over_lanes<2, Op::kLanes / 2, 1>(values, thread.in_warp);
    constexpr int kSharers = Op::kLanes / 2;  // lanes with the same sum
    if (exists && thread.lane % kSharers == 0) {
      sums[thread.lane / kSharers * stride + channel] += values[0];
    }
  }
  __device__ __forceinline__ void copy_to(A* partials) const {
    __syncthreads();
    for (std::int64_t i = threadIdx.x; i < 2 * stride; i += Op::kThreads) {
      partials[i] = sums[i];
    }
  }
};

// Backward of the tile in use.
template <typename Op>
struct ChannelsFirstBackward {
  using A = typename Op::A;
  using E = typename Op::E;
  using Norm = typename Op::Norm;
  static constexpr int N = Op::N;

  const ChannelsFirstBackwardArgs& args;
  const PixelThread<Op>& thread;
  const StagedTile<Op>& tile;
  const PixelExchange<Op>& exchange;
  const TileParameters<Op>& parameters;
  Normalizer<A> normalizers[N];

  // The values of a pixel that its owner shares: the fields of its Normalizer, and later its sums.
  enum Shared { kMean, kRstd, kScale };
  enum Sums { kOfWdyXhat, kOfWdy };

  // Called by all threads, before a barrier.
  __device__ __forceinline__ void share_normalizers() const {
    if (exchange.owns()) {
      Normalizer<A> own{A(1), A(0), A(0), A(0)};
      if (tile.owns()) {
        own =
            Norm::saved(static_cast<const A*>(args.stats), tile.own_row(), args.rows).normalizer();
      }
      exchange.set(kMean, own.mean);
      exchange.set(kRstd, own.rstd);
      exchange.set(kScale, own.scale);
    }
  }
  // Called by all threads, after it.
  __device__ __forceinline__ void take_normalizers() {
    A means[N], rstds[N], scales[N];
    exchange.get(kMean, means);
    exchange.get(kRstd, rstds);
    exchange.get(kScale, scales);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      normalizers[j] = {scales[j], means[j], A(0), rstds[j]};
    }
  }

  // x̂ of a channel, and dn, the gradient with respect to the norm's output.
  __device__ __forceinline__ void normalize(const Pack<E, N> (&packs)[2], A weight, A bias,
                                            A (&xhat)[N], A (&dn)[N]) const {
    to_values(packs[0], xhat);
    to_values(packs[1], dn);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      xhat[j] = Norm::normalized(xhat[j], normalizers[j]);
      if constexpr (Op::kSilu) {
        dn[j] *= silu<E>(multiply_add(xhat[j], weight, bias)).slope;
      }
    }
  }

  // The two sums of each pixel, and also those of each channel if `leaves`.
  __device__ __forceinline__ void add_up(const ChannelSums<Op>& channel_sums, bool leaves,
                                         A (&totals)[2][N]) const {
    A sums[2][N] = {};
    tile.read(thread, [&](std::int64_t channel, bool exists, const Pack<E, N>(&packs)[2]) {
      const A weight = parameters.weight(channel, exists);
      A xhat[N], dn[N];
      normalize(packs, weight, parameters.bias(channel, exists), xhat, dn);
      A of_channel[2] = {};
#pragma unroll
      for (int j = 0; j < N; ++j) {
        of_channel[0] = multiply_add(dn[j], xhat[j], of_channel[0]);
        of_channel[1] += dn[j];
        const A wdy = dn[j] * weight;
        const A met = exists ? xhat[j] : A(0);  // zeros may have an infinite x̂, if the mean is huge
        sums[kOfWdyXhat][j] = multiply_add(wdy, met, sums[kOfWdyXhat][j]);
        sums[kOfWdy][j] += wdy;
      }
      if (leaves) {
        channel_sums.add(thread, channel, exists, of_channel);
      }
    });
    exchange.add(sums);
    exchange.get(kOfWdyXhat, totals[kOfWdyXhat]);
    exchange.get(kOfWdy, totals[kOfWdy]);
  }

  __device__ __forceinline__ void write(const A (&totals)[2][N]) const {
    const A inverse = reciprocal(static_cast<A>(args.cols));
    const auto gradient = [&](std::int64_t channel, const Pack<E, N>(&packs)[2]) {
      const A weight = parameters.weight(channel, true);
      A xhat[N], dn[N];
      normalize(packs, weight, parameters.bias(channel, true), xhat, dn);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const Pullback<Norm, A> pullback({totals[kOfWdyXhat][j], totals[kOfWdy][j]}, normalizers[j],
                                         inverse);
        xhat[j] = pullback(dn[j] * weight, xhat[j]);
      }
      return rounded<E>(xhat);
    };
    tile.write(thread, args.grad_input.data, gradient);
  }
};

// block: Op::kThreads. Shared memory: tiles and exchanged_values(), and beside a whole tile the
// sums of channels and their parameters. partials: null, or [CTAs, 2, partials_stride(channels)].
template <typename Op>
__global__ void __launch_bounds__(Op::kThreads, Op::kCtasPerSm)
    channels_first_backward_kernel(const __grid_constant__ ChannelsFirstBackwardArgs args,
                                   const __grid_constant__ ChannelsFirstBackwardSteps steps,
                                   typename Op::A* partials) {
  using A = typename Op::A;
  extern __shared__ __align__(128) unsigned char tiles[];
  const PixelThread<Op> thread;
  await_kernels_before();
  StagedTile<Op> tile(args, steps, tiles);
  tile.copy_ahead();
  A* const exchanged = reinterpret_cast<A*>(tiles + steps.stages * 2 * steps.some * Op::kRowBytes);
  A* const sums = exchanged + exchanged_values(Op::kTile, Op::kWarps);
  const PixelExchange<Op> exchange(exchanged, thread);
  const std::int64_t stride = partials_stride(args.cols);
  A* const row = partials + blockIdx.x * 2 * stride;
  const ChannelSums<Op> channel_sums{Op::kWhole ? sums : row, stride};
  if (partials != nullptr) {
    channel_sums.clear();
  }
  const TileParameters<Op> parameters(args, partials != nullptr ? sums + 2 * stride : sums);
  ChannelsFirstBackward<Op> backward{args, thread, tile, exchange, parameters, {}};
#pragma unroll 1
  for (;;) {
    backward.share_normalizers();
    tile.await();
    backward.take_normalizers();
    A totals[2][Op::N];
    backward.add_up(channel_sums, partials != nullptr, totals);
    if (args.grad_input.data != nullptr) {
      backward.write(totals);
    }
    if (!tile.next()) {
      break;
    }
    tile.copy_ahead();
  }
  if (Op::kWhole && partials != nullptr) {
    channel_sums.copy_to(row);
  }
}

}  // namespace fused_op::cuda
