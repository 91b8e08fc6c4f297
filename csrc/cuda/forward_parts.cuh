// The forward of many long rows (sm_90) where little comes after the load, as in RMSNorm and, of
// half as many elements, in fp32 LayerNorm: the CTAs of a cluster keep a row in registers, and
// several such clusters are on a multiprocessor, of which some load while others store. Weight and
// bias are read again for each row. Bits are those of forward_long.cuh. H200, bf16, share of the
// limit in forward_pipelined.cuh and here: 0.97 1.00 at 4096x32768, 0.93 0.99 at 2048x65536, 0.94
// 0.97 at 1024x131072, 0.90 1.00 at 6553x20480. Two rows a cluster, which halves the reads of the
// weight, 0.94 0.91 at the first two; bf16 LayerNorm, 0.84 for 0.90 at the first. Included by
// launch_*.cu only; torch-free.
#pragma once

#include "core/norm_args.h"
#include "core/row_source.h"
#include "cuda/cluster_exchange.cuh"
#include "cuda/cluster_layout.h"
#include "cuda/dependent_launch.cuh"
#include "cuda/forward_long.cuh"

namespace fused_op::cuda {

template <typename Norm>
constexpr int kPartsAhead = Norm::kCentered ? 1 : 2;  // vectors of weight and bias
template <typename W, typename T>  // of a multiprocessor: 80 or 64 registers a thread
constexpr int kPartsCtas = sizeof(W) > sizeof(T) ? 3 : 4;

// grid: a cluster a row, of as many CTAs as it takes to have cta_parts of its parts in each; block:
// a warp for every kWarpParts of these, of which cta_parts is a multiple. Dynamic shared memory:
// the moments of the row's parts.
template <typename W, typename Norm, typename T, typename Access>
__global__ void __launch_bounds__(kPartsWarps* kWarpSize, kPartsCtas<W, T>)
    norm_forward_parts_kernel(const __grid_constant__ NormForwardArgs args, int cta_parts) {
#if __CUDA_ARCH__ >= 900  // never launched before
  using Source = Plain<T>;
  using A = Accumulator<T>;
  using Part = PartOf<Source, int>;
  constexpr int N = Source::kElements;
  constexpr int kVectors = kWarpParts * Part::kVectors;  // of a thread

  const int warp = threadIdx.x / kWarpSize;
  const int width = static_cast<int>(args.cols);
  const int row_parts = Part::count(width);
  const int cta_begin = static_cast<int>(cluster_rank()) * cta_parts;
  const int first_part = cta_begin + warp * kWarpParts;
  const int first_col = Part::col(first_part, 0);
  const auto col_of = [&](int v) { return first_col + v * kWarpSize * N; };
  const std::int64_t row = cluster_id();

  __shared__ std::uint64_t arrivals;
  extern __shared__ uint4 shared[];
  auto* const parts = reinterpret_cast<WarpMoments<A>*>(shared);
  const auto ctas = static_cast<int>(cluster_size());
  const ClusterExchange<WarpMoments<A>, 1> exchange{parts, &arrivals, row_parts, ctas, 1};
  exchange.begin();
  await_kernels_before();
  const Source source(args, row);
  using RowAccess = std::conditional_t<kIsFull<Access>, Access, KeptAccess>;
  Pack<T, N> packs[kWarpParts][Part::kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    packs[v / Part::kVectors][v % Part::kVectors] =
        source.template fetch<RowAccess, N>(col_of(v), width);
  }
  exchange.ready();
#pragma unroll
  for (int k = 0; k < kWarpParts; ++k) {
#pragma unroll
    for (int i = 0; i < Part::kVectors; ++i) {
      stay_packed(packs[k][i]);
    }
    const int part = first_part + k;
    if (kIsFull<Access> || part < row_parts) {
      exchange.send(0, part, part_moments<Norm, Access, Source, A>(packs[k], part, width));
    }
  }
  Affine<W, Norm, N, Access> affine[kPartsAhead<Norm>];
#pragma unroll
  for (int v = 0; v < kPartsAhead<Norm>; ++v) {
    affine[v] = {args, col_of(v), width};
  }
  exchange.await(0);
  const Moments<A> moments = long_moments<Norm, Source>(parts, width);
  const bool saves = cta_begin == 0 && threadIdx.x == 0;
  if (!trusted(moments, static_cast<A>(width))) {  // in the whole cluster
    const int cta_end = min(cta_begin + cta_parts, row_parts);
    finish_untrusted_long<W, Norm, Source, VectorAccess, A>(args, row, cta_begin + warp, cta_end,
                                                            saves, ClusterParts<A>{parts, ctas});
    return;
  }
  const Normalizer<A> normalizer =
      normalizer_of<Norm>(args, moments, A(1), reciprocal(static_cast<A>(width)), row, saves);
  T* const target = target_of<Source>(args, row);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    Pack<T, N>& pack = packs[v / Part::kVectors][v % Part::kVectors];
    stay_packed(pack);
    const Pack<T, N> output = output_of(affine[v % kPartsAhead<Norm>], pack, normalizer);
    if (v + kPartsAhead<Norm> < kVectors) {
      affine[v % kPartsAhead<Norm>] = {args, col_of(v + kPartsAhead<Norm>), width};
    }
    Access::store(target, col_of(v), width, output);
  }
#endif
}

}  // namespace fused_op::cuda
