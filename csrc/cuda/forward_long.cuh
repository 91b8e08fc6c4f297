// The forward of rows of any length: a CTA a row, which it reads twice. Included by launch_*.cu
// only; torch-free.
#pragma once

#include "core/norm_args.h"
#include "core/row_source.h"
#include "cuda/forward.cuh"
#include "cuda/row_access.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/row_tile.h"

namespace fused_op::cuda {

// Its parts are those of ClusterTile, merged in the same order: both give the same bits.
template <typename W, typename Norm, typename Source, typename Access>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    norm_forward_streamed_kernel(const __grid_constant__ NormForwardArgs args) {
  using T = typename Source::Element;
  using A = Accumulator<T>;
  constexpr int N = Source::kElements;
  constexpr int kVectors = ClusterTile::kVectors;
  constexpr int kPartCols = kVectors * kWarpSize * N;

  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const std::int64_t row = blockIdx.x;
  const Source source(args, row);
  const A cols = static_cast<A>(args.cols);
  const A inverse_cols = reciprocal(cols);
  const std::int64_t row_parts = (args.cols + kPartCols - 1) / kPartCols;

  __shared__ WarpMoments<A> parts[kMaxParts];
  const CtaExchange<kMaxParts, A> exchange{parts};
  const auto row_moments = [&](A scale, bool refined) {
    exchange.barrier();  // read by all before it is written again
    for (std::int64_t part = warp; part < row_parts; part += kMaxCtaParts) {
      const std::int64_t begin = part * kPartCols;
      Pack<T, N> packs[kVectors];
      typename Source::template Fetched<N> fetched[kVectors];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        fetched[i] =
            source.template fetch<Access, N>(begin + (i * kWarpSize + lane) * N, args.cols);
      }
      source.template finish<Access, kWarpSize>(fetched, packs, begin + lane * N, args.cols);
      const int in_row = valid_elements(begin, args.cols, kPartCols);
      const A count = static_cast<A>(in_row);
      WarpMoments<A> mine{count, group_moments<Norm, Access, kWarpSize>(packs, in_row - lane * N,
                                                                        count, scale, refined)};
      const int slot = static_cast<int>(part % kMaxParts);
      if (part >= kMaxParts) {  // this warp filled the slot before
        __syncwarp();
        mine = append(parts[slot], mine);
      }
      __syncwarp();
      exchange.put(slot, mine);
    }
    exchange.barrier();
    return merge_parts<Norm::kCentered, kMaxParts>(
        parts, static_cast<int>(row_parts < kMaxParts ? row_parts : kMaxParts), cols, inverse_cols);
  };
  // Attempts: as it is, refined, refined and scaled; one copy of the code.
  A scale = 1;
  Moments<A> moments = row_moments(scale, false);
#pragma unroll 1
  for (int attempt = 1; attempt < 3; ++attempt) {
    if (attempt == 1 ? trusted(moments, cols) : !overflowed(moments)) {
      break;
    }
    scale = attempt == 1 ? A(1) : Limits<A>::kScale;
    moments = row_moments(scale, true);
  }
  const Normalizer<A> normalizer =
      Norm::normalizer(moments, scale, inverse_cols, static_cast<A>(args.eps));
  if (args.stats != nullptr && threadIdx.x == 0) {
    Norm::save(normalizer, moments, static_cast<A*>(args.stats), row, args.rows);
  }

  const auto target = target_of<Source>(args, row);
  for (std::int64_t part = warp; part < row_parts; part += kMaxCtaParts) {
    const std::int64_t begin = part * kPartCols;
    Pack<T, N> results[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      results[i] = reload<Access, N>(source, begin + (i * kWarpSize + lane) * N, args.cols);
    }
    Affine<W, Norm, N> affine[1] = {{args, begin + lane * N, args.cols}};
    write_row<kWarpSize, Access>(args, affine, target, begin + lane * N, args.cols, results,
                                 normalizer);
  }
}

}  // namespace fused_op::cuda
