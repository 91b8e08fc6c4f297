// The forward of long rows, many of them in turn (sm_90): a cluster keeps weight and bias in
// registers, copies rows into shared memory some turns ahead, and takes the moments of the next row
// while those of this one are on their way between its CTAs. Bits are those of forward_long.cuh.
// Included by launch_*.cu only; torch-free.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "core/norm_args.h"
#include "core/row_source.h"
#include "cuda/cluster_exchange.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/forward_long.cuh"

namespace fused_op::cuda {

constexpr int kPipelinedParts = kMaxRowThreads / kWarpSize;  // of a CTA: a warp has one
constexpr int kPipelinedStages = 3;                          // five were no faster
constexpr int kPipelinedSlots = 4;
template <typename A>
constexpr std::int64_t pipelined_shared_bytes(std::int64_t row_parts, std::int64_t cta_parts) {
  return kPipelinedSlots * row_parts * sizeof(WarpMoments<A>) +
         kPipelinedStages * cta_parts * kPartVectors * kVectorBytes;
}

// grid: clusters of as many CTAs as it takes to have cta_parts parts of a row in each; block: a
// warp for each of them. Dynamic shared memory: pipelined_shared_bytes().
template <typename W, typename Norm, typename T>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    norm_forward_pipelined_kernel(const __grid_constant__ NormForwardArgs args, int cta_parts) {
#if __CUDA_ARCH__ >= 900  // never launched before
  using Source = Plain<T>;
  using A = Accumulator<T>;
  using Part = PartOf<Source, int>;
  constexpr int N = Source::kElements;
  constexpr int kVectors = Part::kVectors;
  constexpr int kStages = kPipelinedStages;

  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int ctas = static_cast<int>(cluster_size());
  const std::int64_t clusters = gridDim.x / ctas;
  const int width = static_cast<int>(args.cols);
  const int row_parts = Part::count(width);
  const int part = static_cast<int>(cluster_rank()) * cta_parts + warp;
  const A cols = static_cast<A>(width);
  const A inverse_cols = reciprocal(cols);

  __shared__ std::uint64_t arrivals[kPipelinedSlots];
  extern __shared__ uint4 shared[];
  auto* const parts = reinterpret_cast<WarpMoments<A>*>(shared);
  const std::int64_t first_row = cluster_id();
  const ClusterExchange<WarpMoments<A>, kPipelinedSlots> exchange{
      parts, arrivals, row_parts, ctas, cluster_rows(args.rows, first_row, clusters)};
  exchange.begin();
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    if (const std::int64_t row = first_row + stage * clusters; row < args.rows) {
      prefetch_row<kVectors>(row_of<T>(args.input, row), Part::col(part, 0), kWarpSize * N, width);
    }
  }
  await_kernels_before();

  const std::uint32_t held = shared_address(parts + kPipelinedSlots * row_parts) +
                             (warp * kVectors * kWarpSize + lane) * kVectorBytes;
  const std::uint32_t stage_bytes = cta_parts * kPartVectors * kVectorBytes;
  const auto copy = [&](std::int64_t row, int stage) {
    if (row < args.rows) {
      const T* const from = row_of<T>(args.input, row);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int col = Part::col(part, i);
        if (col < width) {
          copy_async(held + stage * stage_bytes + i * kWarpSize * kVectorBytes,
                     reinterpret_cast<std::uintptr_t>(from + col));
        }
      }
    }
    __pipeline_commit();  // an empty group too: the count of groups is the count of rows
  };
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    copy(first_row + stage * clusters, stage);
  }
  Affine<W, Norm, N> affine[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    affine[i] = {args, Part::col(part, i), width};
  }
  exchange.ready();
  if (part >= row_parts) {  // a warp too many in the last CTA
    return;
  }

  const auto vectors_in = [&](int stage) { return HeldVectors<T, N>{held + stage * stage_bytes}; };
  const auto send_moments = [&](unsigned number, int stage) {
    exchange.send(number, part,
                  part_moments<Norm, VectorAccess, Source, A>(vectors_in(stage), part, width));
  };
  __pipeline_wait_prior(kStages - 1);
  send_moments(0, 0);
  int stage = 0;
  unsigned number = 0;  // of the cluster's rows
  for (std::int64_t row = first_row; row < args.rows; row += clusters, ++number) {
    const int next_stage = stage + 1 == kStages ? 0 : stage + 1;
    __pipeline_wait_prior(kStages - 2);
    if (row + clusters < args.rows) {
      send_moments(number + 1, next_stage);
    }
    WarpMoments<A>* const row_moments = exchange.await(number);
    const Moments<A> moments = long_moments<Norm, Source>(row_moments, width);
    const bool saves = part == 0 && lane == 0;
    if (!trusted(moments, cols)) {  // in the whole cluster
      finish_untrusted_long<W, Norm, Source, VectorAccess, A>(args, row, part, part + 1, saves,
                                                              ClusterParts<A>{row_moments, ctas});
    } else {
      const Normalizer<A> normalizer =
          normalizer_of<Norm>(args, moments, A(1), inverse_cols, row, saves);
      T* const target = target_of<Source>(args, row);
      const HeldVectors<T, N> vectors = vectors_in(stage);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        VectorAccess::store(target, Part::col(part, i), width,
                            output_of(affine[i], vectors[i], normalizer));
      }
    }
    copy(row + kStages * clusters, stage);
    stage = next_stage;
  }
#endif
}

}  // namespace fused_op::cuda
