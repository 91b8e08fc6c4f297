// The forward kernel for rows that fit into the registers of one CTA. A row is read once and stays
// in registers, packed as it came. Its moments take two passes over the registers; then it is
// normalised and stored. The tile, integers that the plan chose (plan.h), says which threads hold a
// row. Compiled by nvcc and by NVRTC; torch-free.
#pragma once

#include "core/epilogue.h"
#include "core/norm_args.h"
#include "core/norm_math.h"
#include "core/source.h"
#include "cuda/access.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/forward_halves.cuh"
#include "cuda/forward_layout.h"
#include "cuda/forward_tile.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/words.cuh"

namespace fused_op::cuda {

// The normaliser of a row; one thread of the row saves its statistics for backward.
template <typename Norm, typename A>
__device__ __forceinline__ Normalizer<A> normalizer_of(const NormForwardArgs& args,
                                                       Moments<A> moments, A scale, A inverse_cols,
                                                       std::int64_t row, bool saves) {
  unscale(moments, scale);
  const Normalizer<A> normalizer =
      Norm::normalizer(moments, scale, inverse_cols, static_cast<A>(args.eps));
  if (args.stats != nullptr && saves) {
    Norm::save(normalizer, moments, static_cast<A*>(args.stats), row, args.rows);
  }
  return normalizer;
}

// Computes the moments of a row again, element by element: slow, and rare.
template <typename Op, typename Tile, typename A>
struct Rescue {
  using Norm = typename Op::Norm;
  using Row = typename Op::Source::Row;
  static constexpr int N = Tile::kPack;
  using OneVector = Lane<Tile::kLanes, 0, 0, false>;

  const typename Op::Args& args;
  const ForwardPlace& place;
  int width;
  CtaExchange<A> exchange;

  __device__ OneVector lane_of(int i) const {
    // Lanes past the last row load nothing: that row belongs to another warp, which may not have
    // stored it yet.
    return {place.warp * Tile::kWarpCols + place.lane * N + i * Tile::kStep, place.live ? width : 0,
            place.live};
  }
  __device__ void read(const OneVector& lane, Pack<Row, N> (&pack)[1]) const {
    const typename Op::Source source(args, place.row);
    source.template read<LoneWords>(lane, pack);
  }
  // The moments of the elements times `scale`, with a refined mean.
  __device__ Moments<A> moments(A scale) const {
    WarpMoments<A> mine{};
#pragma unroll 1
    for (int i = 0; i < Tile::kVectors; ++i) {
      const OneVector lane = lane_of(i);
      Pack<Row, N> pack[1];
      read(lane, pack);
      const int first = lane.first - place.lane * N;
      const A count = static_cast<A>(max(min(width - first, Tile::kStep), 0));
      mine = append(mine, {count, moments_of_lanes<Norm, false, Tile::kLanes>(lane, pack, count,
                                                                              scale, true)});
    }
    if (place.warps == 1) {
      return mine.moments;
    }
    exchange.barrier();  // all have read before it is written again
    exchange.put(place.warp, mine);
    exchange.barrier();
    return merge_parts<Norm::kCentered, kMaxRowWarps>(exchange.parts, place.warps,
                                                      reciprocal(static_cast<A>(width)));
  }
  __device__ void write(const Normalizer<A>& normalizer) const {
    using Epilogue = typename Op::Epilogue;
    using Y = typename Op::Epilogue::Output;
    Y* const output = static_cast<Y*>(args.output.data) + place.row * width;
#pragma unroll 1
    for (int i = 0; i < Tile::kVectors; ++i) {
      const OneVector lane = lane_of(i);
      Pack<Row, N> pack[1];
      read(lane, pack);
      A values[N];
      to_values(pack[0], values);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        values[j] = Norm::normalized(values[j], normalizer);
      }
      Epilogue epilogue(args, place.row, lane);
      tell(epilogue, normalizer);
      const auto parameters = Epilogue::template load<Norm, typename Op::Access, N>(
          args, place.row, lane.first, width - lane.first);
      typename Epilogue::template Beside<N, 1> beside;
      Epilogue::template load_beside<Words>(args, place.row, lane, beside);
      epilogue.template apply<Norm>(parameters, beside, 0, values);
      const Pack<Y, N> packs[1] = {rounded<Y>(values)};
      Words::store(lane, output, packs);
    }
  }
};

// Finishes the kernel for a warp that has a row whose moments are not trusted(). It is a function
// of its own so that the common path pays neither registers nor length for it. It computes its
// place again: a reference to the kernel's would put that on the stack of every thread.
template <typename Op, typename Tile, typename A>
__device__ __noinline__ void finish_untrusted(const typename Op::Args& args, int width,
                                              Moments<A> moments, WarpMoments<A>* parts) {
  const ForwardPlace place = place_of<Op, Tile>(args, width);
  const Rescue<Op, Tile, A> rescue{args, place, width, CtaExchange<A>{parts}};
  const bool trust = trusted(moments, static_cast<A>(width));
  A scale = 1;
  __syncwarp();  // the row may be the sum, which the lanes have written for each other
#pragma unroll 1
  for (int attempt = 0; attempt < 2; ++attempt) {
    const A next_scale = attempt == 0 ? A(1) : Limits<A>::kScale;
    const Moments<A> refined = rescue.moments(next_scale);
    if (!trust && (attempt == 0 || overflowed(moments))) {
      moments = refined;
      scale = next_scale;
    }
  }
  const bool saves = place.live && place.lane == 0 && place.warp == 0;
  Op::write_again(args, rescue,
                  normalizer_of<typename Op::Norm>(
                      args, moments, scale, reciprocal(static_cast<A>(width)), place.row, saves));
}

// Normalises a lane's packs, whose scale is 1, and stores them. Parameters are loaded kAhead packs
// ahead.
template <typename Op, typename Tile, typename Lane, typename Parameters, typename Row, int N,
          int kVectors, typename A>
__device__ __forceinline__ void write_row(
    const typename Op::Args& args, std::int64_t row, const Lane& lane,
    Parameters (&parameters)[Tile::kAhead],
    const typename Op::Epilogue::template Beside<N, kVectors>& beside,
    const Pack<Row, N> (&packs)[kVectors], const Normalizer<A>& normalizer) {
  using Norm = typename Op::Norm;
  using Access = typename Op::Access;
  using Y = typename Op::Epilogue::Output;
  using Epilogue = typename Op::Epilogue;
  // In a row of several warps, x - mean is not at hand: a warp's moments have its own mean.
  constexpr RowScale kScale = Tile::kOneWarp ? RowScale::kOne : RowScale::kAny;
  Y* const output = static_cast<Y*>(args.output.data) + row * lane.width;
  Epilogue epilogue(args, row, lane);
  tell(epilogue, normalizer);
  const bool together = Access::stores_together(output + lane.first);
  Pack<Y, N> results[Access::kStoresTogether ? kVectors : 1];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    A values[N];
    to_values(packs[i], values);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      values[j] = Norm::template normalized<kScale>(values[j], normalizer);
    }
    epilogue.template apply<Norm>(parameters[i % Tile::kAhead], beside, i, values);
    Pack<Y, N>& result = results[Access::kStoresTogether ? i : 0];
    result = rounded<Y>(values);
    if (!together) {
      Access::store_pack(lane, output, i, result);
    }
    if (i + Tile::kAhead < kVectors) {
      const int next = i + Tile::kAhead;
      auto& own = parameters[i % Tile::kAhead];
      own = Epilogue::template load<Norm, Access, N>(args, row, lane.col(next),
                                                     lane.template valid<N>(next), own);
    }
  }
  if constexpr (Access::kStoresTogether) {
    if (together) {
      Access::store(lane, output, results);
    }
  }
}

// What a kernel computes, and where a row goes once its normaliser is known: write() has it in
// registers, write_again() has to read it once more. prepare() may change what was loaded before
// the source turns it into a row.
template <typename Norm_, typename Source_, typename Epilogue_, typename Access_>
struct ForwardOp {
  using Args = typename Epilogue_::Args;
  using Norm = Norm_;
  using Source = Source_;
  using Epilogue = Epilogue_;
  using Access = Access_;
  static constexpr bool kSumIsAll = false;  // only what the source stores is wanted

  template <typename Tile, typename Lane, typename Loaded>
  __device__ __forceinline__ static void prepare(const Args&, const ForwardPlace&, const Lane&,
                                                 Loaded&) {}
  template <typename Tile, typename Lane, typename Parameters, typename Beside, typename Packs,
            typename A>
  __device__ __forceinline__ static void write(const Args& args, const ForwardPlace& place,
                                               const Lane& lane, Parameters& parameters,
                                               const Beside& beside, const Packs& packs,
                                               const Normalizer<A>& normalizer) {
    if constexpr (kTakesHalves<ForwardOp, Tile>) {
      write_halves<ForwardOp>(args, place.row, lane, parameters, packs, normalizer);
    } else {
      write_row<ForwardOp, Tile>(args, place.row, lane, parameters, beside, packs, normalizer);
    }
  }
  template <typename Rescue, typename A>
  __device__ __forceinline__ static void write_again(const Args&, const Rescue& rescue,
                                                     const Normalizer<A>& normalizer) {
    rescue.write(normalizer);
  }
};

// Processes this lane's part of a row. KernelTile is the tile of all warps, Tile that of this one.
template <typename Op, typename KernelTile, typename Tile, typename A>
__device__ __forceinline__ void take_row(const typename Op::Args& args, const ForwardPlace& place,
                                         int width, WarpMoments<A> (&parts)[kMaxRowWarps]) {
  using Norm = typename Op::Norm;
  using Source = typename Op::Source;
  using Epilogue = typename Op::Epilogue;
  using Access = typename Op::Access;
  using Row = typename Source::Row;
  constexpr int N = Tile::kPack;
  constexpr bool kWhole = Access::kWhole || (Tile::kWidth > 0 && Tile::kWidth % N == 0);

  const Lane<Tile::kLanes, Tile::kStep, Tile::kSure, !Tile::kFew> lane{
      place.warp * Tile::kWarpCols + place.lane * N, width, place.live};
  const Source source(args, place.row);
  if (blockIdx.x < kPrefetchingCtas) {
    source.template prefetch<Access, Tile::kVectors>(lane);
  }
  await_kernels_before();
  Pack<Row, N> row[Tile::kVectors];
  typename Source::template Loaded<N, Tile::kVectors> loaded;
  typename Epilogue::template Beside<N, Tile::kVectors> beside;
  source.template load<Access>(lane, loaded);
  Epilogue::template load_beside<Access>(args, place.row, lane, beside);
  Op::template prepare<Tile>(args, place, lane, loaded);
  source.template finish<Access>(lane, loaded, row);
  if constexpr (Op::kSumIsAll) {
    return;
  }
  constexpr int kAhead = kTakesHalves<Op, Tile> ? Tile::kVectors : Tile::kAhead;
  typename Epilogue::template Parameters<N> parameters[kAhead];
  const auto load_parameters = [&] {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      parameters[i] = Epilogue::template load<Norm, Access, N>(args, place.row, lane.col(i),
                                                               lane.template valid<N>(i));
    }
  };
  if constexpr (Tile::kFew) {
    load_parameters();
  }
  const A inverse_cols = reciprocal(static_cast<A>(width));
  const A count = static_cast<A>(
      Tile::kFull ? Tile::kWarpCols
                  : max(min(width - place.warp * Tile::kWarpCols, Tile::kWarpCols), 0));
  Moments<A> moments = moments_of_lanes<Norm, kWhole, Tile::kLanes>(lane, row, count, A(1), false);
  if (!Tile::kOneWarp && place.warps > 1) {
    const CtaExchange<A> exchange{parts};
    exchange.put(place.warp, {count, moments});
    exchange.barrier();
    moments = merge_parts<Norm::kCentered, kMaxRowWarps>(parts, place.warps, inverse_cols);
  }
  // Every thread of a row decides the same. Rows that share a warp go together.
  if (!__all_sync(kAllLanes, trusted(moments, static_cast<A>(width)))) {
    finish_untrusted<Op, KernelTile>(args, width, moments, parts);
    return;
  }
  const bool saves = place.live && place.lane == 0 && place.warp == 0;
  const Normalizer<A> normalizer =
      normalizer_of<Norm>(args, moments, A(1), inverse_cols, place.row, saves);
  if constexpr (!Tile::kFew) {
    load_parameters();
  }
  Op::template write<Tile>(args, place, lane, parameters, beside, row, normalizer);
}

// Which calls have code of their own for full warps. us without and with: LayerNorm 82.2 76.0 at
// 13112x5121, 77.2 72.8 at 6712x9999; but 138.3 145.4 at 13112x5121 with a residual (H200, bf16).
template <typename Norm, typename X, bool kSplit, typename W, typename Y, typename Access>
constexpr bool kHasFullWarps<ForwardOp<Norm, Plain<X, kSplit>, Affine<W, Y>, Access>> =
    sizeof(X) == 2 && !Access::kWhole;

// grid: enough CTAs for all rows; block: whole rows, or one row if it takes several warps.
template <typename Op, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    forward_kernel(const __grid_constant__ typename Op::Args args) {
  __shared__ WarpMoments<Accumulator<typename Op::Source::Row>> parts[kMaxRowWarps];
  const int width = Tile::kWidth > 0 ? Tile::kWidth : static_cast<int>(args.cols);
  const ForwardPlace place = place_of<Op, Tile>(args, width);
  if constexpr (kHasFullWarps<Op> && kLastWarpDiffers<Tile>) {
    if (place.warp + 1 < Tile::kWarps) {
      take_row<Op, Tile, FullWarp<Tile>>(args, place, width, parts);
      return;
    }
  }
  take_row<Op, Tile, Tile>(args, place, width, parts);
}

}  // namespace fused_op::cuda
