// Forward of long rows on GPUs with clusters (sm_90). The CTAs of a cluster share a row, which
// stays in their registers, and send each other the moments of its parts. An SM runs CTAs of
// several clusters, so some load while others store. Compiled by nvcc and by NVRTC; torch-free.
#pragma once

#include "cuda/cluster_exchange.cuh"
#include "cuda/long_rows.cuh"

namespace fused_op::cuda {

// The packs of the k-th part of a warp.
template <typename Tile, int kPacks, typename T, int N>
__device__ __forceinline__ const Pack<T, N> (&packs_of_part(const Pack<T, N> (&packs)[kPacks],
                                                            int k)) [Tile::kVectors] {
  return reinterpret_cast<const Pack<T, N>(&)[Tile::kVectors]>(packs[k * Tile::kVectors]);
}

// Sends the moments of a warp's parts to all CTAs of the cluster.
template <typename Op, typename Tile, typename A, typename Lane, typename Row, typename Exchange>
__device__ __forceinline__
    void send_parts(const Lane& lane, const Pack<Row, Tile::kPack> (&row)[Tile::kPacks],
                    int first_part, const Exchange& exchange) {
#pragma unroll
  for (int k = 0; k < Tile::kParts; ++k) {
    const int part = first_part + k;
    const int left = lane.width - part * Tile::kPartCols;
    if (left > 0) {
      const Lane of_part{lane.first + k * Tile::kPartCols, lane.width, true};
      exchange.send(0, part,
                    moments_of_part<Op, Tile, A>(of_part, packs_of_part<Tile>(row, k),
                                                 min(left, Tile::kPartCols)));
    }
  }
}

// grid: one cluster a row, with as many CTAs as it takes to give each of them cta_parts parts;
// block: one warp for every Tile::kParts of these. cta_parts is a multiple of Tile::kParts. No CTA
// is without a part.
template <typename Op, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    forward_cluster_kernel(const __grid_constant__ typename Op::Args args, int cta_parts) {
#if __CUDA_ARCH__ >= 900  // the kernel is never launched on older GPUs
  using Norm = typename Op::Norm;
  using Source = typename Op::Source;
  using Access = typename Op::Access;
  using Epilogue = typename Op::Epilogue;
  using Row = typename Source::Row;
  using A = Accumulator<Row>;
  constexpr int N = Tile::kPack;

  const int width = static_cast<int>(args.cols);
  const int row_parts = (width + Tile::kPartCols - 1) / Tile::kPartCols;
  const int thread = static_cast<int>(threadIdx.x);
  const int cta_begin = static_cast<int>(cluster_rank()) * cta_parts;
  const int first_part = cta_begin + thread / kWarpSize * Tile::kParts;
  const std::int64_t row = cluster_id();
  const Lane<kWarpSize, Tile::kStep, 0, true> lane{
      first_part * Tile::kPartCols + thread % kWarpSize * N, width, true};

  __shared__ std::uint64_t arrivals;
  alignas(16) __shared__ WarpMoments<A> slots[kMaxSlots];
  const auto ctas = static_cast<int>(cluster_size());
  const ClusterExchange<WarpMoments<A>, 1> exchange{slots, &arrivals, row_parts, ctas, 1};
  exchange.begin();
  const Source source(args, row);
  if (blockIdx.x < kPrefetchingCtas) {
    source.template prefetch<Access, Tile::kPacks>(lane);
  }
  await_kernels_before();
  typename Source::template Loaded<N, Tile::kPacks> loaded;
  Pack<Row, N> packs[Tile::kPacks];
  typename Epilogue::template Beside<N, Tile::kPacks> beside;
  source.template load<Access>(lane, loaded);
  Epilogue::template load_beside<Access>(args, row, lane, beside);
  exchange.ready();
  source.template finish<Access>(lane, loaded, packs);
  send_parts<Op, Tile, A>(lane, packs, first_part, exchange);
  typename Epilogue::template Parameters<N> parameters[Tile::kAhead];
  load_parameters<Op, Tile>(args, row, lane, parameters);
  exchange.await(0);
  stay_packed(packs);
  const Moments<A> moments = merge_slots<Norm, Tile>(slots, width);
  const bool saves = cta_begin == 0 && thread == 0;
  if (!trusted(moments, static_cast<A>(width))) {  // all CTAs of the cluster decide the same
    const int end = min(first_part + Tile::kParts, row_parts);
    finish_untrusted_long<Op, Tile, A>(args, row, first_part, end, 1, saves,
                                       ClusterParts<A>{slots, ctas});
    return;
  }
  const Normalizer<A> normalizer =
      normalizer_of<Norm>(args, moments, A(1), reciprocal(static_cast<A>(width)), row, saves);
  write_row<Op, Tile>(args, row, lane, parameters, beside, packs, normalizer);
#endif
}

}  // namespace fused_op::cuda
