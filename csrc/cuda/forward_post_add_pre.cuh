// The forward of two norms with an addition between them: forward_kernel of forward_rows.cuh with a
// different beginning. The branch is normalised in the registers that it was loaded into, before it
// is added. That takes one more reduction. Compiled by nvcc and by NVRTC; torch-free.
#pragma once

#include <type_traits>

#include "core/post_add_pre.h"
#include "cuda/forward_rows.cuh"

namespace fused_op::cuda {

// Post and Pre are both ForwardOp: Pre adds a residual to the output of Post for the same rows.
template <typename Post, typename Pre>
struct PostAddPreOp : Pre {
  using Args = PostAddPreForwardArgs;
  using Norm = typename Post::Norm;
  using Access = typename Pre::Access;
  using Epilogue = typename Pre::Epilogue;
  using X = typename Post::Source::Row;
  using A = Accumulator<X>;
  static_assert(std::is_same_v<X, typename Post::Epilogue::Output>);
  static_assert(std::is_same_v<X, typename Pre::Source::Row>, "one deal of the elements to lanes");
  static_assert(std::is_same_v<Access, typename Post::Access>, "one deal of rows");

  // Normalises the branch, which Pre loaded as its input.
  template <typename Tile, typename Lane, typename Loaded>
  __device__ __forceinline__ static void prepare(const Args& args, const ForwardPlace& place,
                                                 const Lane& lane, Loaded& loaded) {
    const A inverse_cols = reciprocal(static_cast<A>(lane.width));
    __shared__ WarpMoments<A> parts[kMaxRowWarps];
    const Moments<A> moments = moments_of<Tile>(place, lane, loaded.input, inverse_cols, parts);
    if (!__all_sync(kAllLanes, trusted(moments, static_cast<A>(lane.width)))) {
      finish_untrusted<Post, Tile>(args.post, lane.width, moments, parts);
      load_written<Tile>(args, place, lane, loaded);
      return;
    }
    const bool saves = place.live && place.lane == 0 && place.warp == 0;
    const Normalizer<A> normalizer =
        normalizer_of<Norm>(args.post, moments, A(1), inverse_cols, place.row, saves);
    normalize<Tile>(args.post, place.row, lane, normalizer, loaded.input);
  }

 private:
  // Whether a pack is wholly inside the row or wholly outside.
  template <typename Tile>
  static constexpr bool kWhole =
      Post::Access::kWhole || (Tile::kWidth > 0 && Tile::kWidth % Tile::kPack == 0);

  // Repeats the steps of forward_kernel, so that the bits are those of the norm alone.
  template <typename Tile, typename Lane, int N, int kVectors>
  __device__ __forceinline__ static Moments<A> moments_of(const ForwardPlace& place,
                                                          const Lane& lane,
                                                          const Pack<X, N> (&row)[kVectors],
                                                          A inverse_cols,
                                                          WarpMoments<A> (&parts)[kMaxRowWarps]) {
    const A count = static_cast<A>(
        Tile::kFull ? Tile::kWarpCols
                    : max(min(lane.width - place.warp * Tile::kWarpCols, Tile::kWarpCols), 0));
    const Moments<A> mine =
        moments_of_lanes<Norm, kWhole<Tile>, Tile::kLanes>(lane, row, count, A(1), false);
    if (Tile::kOneWarp || place.warps == 1) {
      return mine;
    }
    const CtaExchange<A> exchange{parts};
    exchange.put(place.warp, {count, mine});
    exchange.barrier();
    return merge_parts<Norm::kCentered, kMaxRowWarps>(parts, place.warps, inverse_cols);
  }

  template <typename Tile, typename Lane, int N, int kVectors>
  __device__ __forceinline__ static void normalize(const NormForwardArgs& args, std::int64_t row,
                                                   const Lane& lane,
                                                   const Normalizer<A>& normalizer,
                                                   Pack<X, N> (&packs)[kVectors]) {
    using Affine = typename Post::Epilogue;
    const auto parameters_of = [&](int i) {
      return Affine::template load<Norm, typename Post::Access, N>(args, row, lane.col(i),
                                                                   lane.template valid<N>(i));
    };
    typename Affine::template Parameters<N> parameters[Tile::kAhead];
#pragma unroll
    for (int i = 0; i < Tile::kAhead; ++i) {
      parameters[i] = parameters_of(i);
    }
    Affine affine(args, row, lane);
    const typename Affine::template Beside<N, kVectors> beside{};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      A values[N];
      to_values(packs[i], values);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        values[j] = Norm::normalized(values[j], normalizer);
      }
      affine.template apply<Norm>(parameters[i % Tile::kAhead], beside, i, values);
      const int valid = lane.template valid<N>(i);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        values[j] = valid > (kWhole<Tile> ? 0 : j) ? values[j] : A(0);  // see moments_of_lanes()
      }
      packs[i] = rounded<X>(values);
      if (i + Tile::kAhead < kVectors) {
        parameters[i % Tile::kAhead] = parameters_of(i + Tile::kAhead);
      }
    }
  }

  // For a row that finish_untrusted() has written to memory. Loads both parts again, so that no
  // register is kept meanwhile. The branch lies where the sum will be.
  template <typename Tile, typename Lane, typename Loaded>
  __device__ __forceinline__ static void load_written(const Args& args, const ForwardPlace& place,
                                                      const Lane& lane, Loaded& loaded) {
    if (!Tile::kOneWarp && place.warps > 1) {
      __syncthreads();
    } else {
      __syncwarp();
    }
    const typename Pre::Source source(args, place.row);
    // The row of a lane that is not live may be another warp's.
    const X* const branch = place.live ? source.sum : source.input;
    using Alone = std::conditional_t<Access::kWhole, Access, LoneWords>;
    Alone::load(lane, branch, loaded.input);
    Access::load(lane, source.residual, loaded.residual);
  }
};

// The op of a call that wants only the sum.
template <typename Post, typename Pre>
struct PostAddOp : PostAddPreOp<Post, Pre> {
  static constexpr bool kSumIsAll = true;
};

}  // namespace fused_op::cuda
