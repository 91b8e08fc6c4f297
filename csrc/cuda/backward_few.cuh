// The backward of few rows, in one launch. dx needs sums over a row, the parameter gradients sums
// over a column, and neither needs the other: some CTAs take rows, the others columns, and x and dy
// are read twice, from the L2 cache. That costs less than partial sums and the second kernel that
// adds them: H200, bf16, us, with these and here, 3.1 1.3 at 1x1024, 4.4 2.2 at 64x1024, 5.3 3.0 at
// 128x2048, 8.0 5.8 at 256x4096. dx has the bits of norm_backward_kernel. Included by launch_*.cu
// only; torch-free.
#pragma once

#include "core/norm_args.h"
#include "core/row_source.h"
#include "cuda/backward.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/flexible.cuh"
#include "cuda/row_access.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/row_tile.h"
#include "cuda/word_access.cuh"

namespace fused_op::cuda {

// dx of a row, in RowTile<32, per_lane> of at most kVectors. block: (threads of a row, rows).
template <typename W, typename Norm, typename Source, typename Access, int kVectors>
__device__ __forceinline__ void few_rows_dx(const NormBackwardArgs& args, std::int64_t row,
                                            int per_lane) {
  using T = typename Source::Element;
  using A = Accumulator<T>;
  constexpr int N = Source::kElements;
  __shared__ PullbackSums<A> parts[kMaxBackwardWarps];

  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int warps = blockDim.x / kWarpSize;
  const int width = static_cast<int>(args.cols);
  const int live_width = row < args.rows ? width : 0;
  row = min(row, args.rows - 1);
  const auto col_of = [&](int i) {
    return (warp * per_lane + i) * kWarpSize * N + lane * kRun<Access, T, N>;
  };
  // Past this lane's vectors no column is left.
  const auto width_at = [&](int i, int columns) { return i < per_lane ? columns : 0; };
  const T* const x_row = row_of<T>(args.x, row);
  const T* const dy_row = row_of<T>(args.grad_output, row);
  constexpr bool kAdds = Source::kGradStreams == 3;
  // The gradient of the sum is asked for with x and dy, but by lanes that share blocks, which have
  // no registers for it before the products are made: then. H200, bf16, LayerNorm, us at 64x4095
  // and 1x4097: 4.6 3.8, with packs of neighbouring elements 3.1 2.7. A prefetch of it beside those
  // of x and dy gains little of that, 4.3 3.6; one into the L1 cache loses, 5.4 5.0.
  constexpr bool kSumAhead = kAdds && !Access::kSharesBlocks;
  const auto load_sum = [&](int i) {
    return Access::template load<N>(row_of<T>(args.grad_sum, row), col_of(i),
                                    width_at(i, live_width));
  };
  const auto load_weight = [&](int i) -> Pack<W, N> {
    return lane_weight<W, T, N, Access>(args, col_of(i), width_at(i, width));
  };
  // Four vectors by words have none for weights wider than the rows either, and load them in turn.
  constexpr bool kWeightAhead =
      Access::kShifts || !Access::kSharesBlocks || kVectors == 2 || sizeof(W) <= sizeof(T);
  Pack<T, N> x[kVectors], dy[kVectors], sum[kAdds ? kVectors : 1];
  Pack<W, N> weight[kWeightAhead ? kVectors : 1];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int live = width_at(i, live_width);
    x[i] = Access::template load<N>(x_row, col_of(i), live);
    dy[i] = Access::template load<N>(dy_row, col_of(i), live);
    if constexpr (kWeightAhead) {
      weight[i] = load_weight(i);
    }
    if constexpr (kSumAhead) {
      sum[i] = load_sum(i);
    }
  }
  const Normalizer<A> normalizer =
      Norm::saved(static_cast<const A*>(args.stats), row, args.rows).normalizer();
  PullbackSums<A> sums{};
  A xhat[kVectors][N], wdy[kVectors][N];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int live = width_at(i, live_width);
    if constexpr (Access::kSharesBlocks) {
      Access::clip_to(normalizer.mean, live - col_of(i), x[i], dy[i]);
    }
    A gradient[N];
    unpack(x[i], xhat[i]);
    unpack(dy[i], gradient);
    unpack(kWeightAhead ? weight[kWeightAhead ? i : 0] : load_weight(i), wdy[i]);
    if (Access::kSharesBlocks ? i < per_lane : col_of(i) < live) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        xhat[i][j] = Norm::normalized(xhat[i][j], normalizer);
        wdy[i][j] *= gradient[j];
        sums.add(wdy[i][j], xhat[i][j]);
      }
    }
  }
  if constexpr (kAdds && !kSumAhead) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      sum[i] = load_sum(i);
    }
  }
  const int team = threadIdx.y;
  sums = row_sum<Norm, kWarpSize, kMaxBackwardWarps>(sums, parts + team * warps, team, warp, warps);
  const Pullback<Norm, A> pullback(sums, normalizer, reciprocal(static_cast<A>(width)));
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    A residual[N];
    if constexpr (kAdds) {
      unpack(sum[i], residual);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      xhat[i][j] = pullback(wdy[i][j], xhat[i][j]);
      if constexpr (kAdds) {
        xhat[i][j] += residual[j];
      }
    }
    x[i] = pack_from<T, N>(xhat[i]);
  }
  T* const dx_row = static_cast<T*>(args.grad_input.data) + row * args.cols;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (i < per_lane) {
      const Pack<T, N> pack[1] = {x[i]};
      Access::template store_row<kWarpSize>(dx_row, col_of(i), live_width, pack);
    }
  }
}

// The parameter gradients of kSlabLanes vectors of columns: groups of kSlabLanes threads take rows
// in turn, a thread a vector; then the threads' sums are added in order.
constexpr int kSlabLanes = 8;
template <typename W, typename Norm, typename Source, typename Access>
__device__ __forceinline__ void few_rows_columns(const NormBackwardArgs& args, int slab) {
  using T = typename Source::Element;
  using A = Accumulator<T>;
  constexpr int N = Source::kElements;
  constexpr int kCols = kSlabLanes * N;
  constexpr int kGroupsOfWarp = kWarpSize / kSlabLanes;
  __shared__ A sums[kMaxBackwardWarps][Norm::kGrads][kCols];

  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int threads = blockDim.x * blockDim.y;
  const int lane = thread % kSlabLanes;
  const int width = static_cast<int>(args.cols);
  const int first_col = slab * kCols;
  const int col = first_col + lane * N;
  A totals[2][N] = {};
#pragma unroll 4
  for (std::int64_t row = thread / kSlabLanes; row < args.rows; row += threads / kSlabLanes) {
    Pack<T, N> x_pack = Access::template load<N>(row_of<T>(args.x, row), col, width);
    Pack<T, N> dy_pack = Access::template load<N>(row_of<T>(args.grad_output, row), col, width);
    const Normalizer<A> normalizer =
        Norm::saved(static_cast<const A*>(args.stats), row, args.rows).normalizer();
    A x[N], dy[N];
    unpack(x_pack, x);
    unpack(dy_pack, dy);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      totals[0][j] = multiply_add(dy[j], Norm::normalized(x[j], normalizer), totals[0][j]);
      totals[1][j] += dy[j];
    }
  }
#pragma unroll
  for (int grad = 0; grad < Norm::kGrads; ++grad) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      A& total = totals[grad][j];
#pragma unroll
      for (int groups = 1; groups < kGroupsOfWarp; groups *= 2) {
        total += __shfl_xor_sync(kAllLanes, total, groups * kSlabLanes);
      }
      if (thread % kWarpSize < kSlabLanes) {
        sums[thread / kWarpSize][grad][lane * N + j] = total;
      }
    }
  }
  __syncthreads();
  const int grad = thread / kCols;
  const int target_col = first_col + thread % kCols;
  if (grad < Norm::kGrads && target_col < width) {
    A total = 0;
    for (int warp = 0; warp < threads / kWarpSize; ++warp) {
      total += sums[warp][grad][thread % kCols];
    }
    void* const target = grad == 0 ? args.grad_weight : args.grad_bias;
    if (target != nullptr) {
      finish_gradient<W>(target, args.param_dtype, args.add_grads, target_col, total);
    }
  }
}

// grid: row_ctas, which take the rows of their block, and then a CTA for every slab of columns.
template <typename W, typename Norm, typename Source, typename Access, int kVectors>
__global__ void __launch_bounds__(kVectors == 2 ? kMaxBackwardWarps * kWarpSize : kMaxRowThreads, 1)
    norm_backward_few_kernel(const __grid_constant__ NormBackwardArgs args, int row_ctas,
                             int per_lane) {
  const int cta = static_cast<int>(blockIdx.x);
  const std::int64_t row = static_cast<std::int64_t>(cta) * blockDim.y + threadIdx.y;
  if (cta < row_ctas && row < args.rows) {
    using T = typename Source::Element;
    constexpr int kStep = kWarpSize * Source::kElements;
    const int warp_col = static_cast<int>(threadIdx.x) / kWarpSize * per_lane * kStep;
    const int col = warp_col + static_cast<int>(threadIdx.x) % kWarpSize * Source::kElements;
    const int width = min(static_cast<int>(args.cols), warp_col + per_lane * kStep);
    prefetch_row<kVectors>(row_of<T>(args.x, row), col, kStep, width);
    prefetch_row<kVectors>(row_of<T>(args.grad_output, row), col, kStep, width);
  }
  await_kernels_before();
  if (cta < row_ctas) {
    few_rows_dx<W, Norm, Source, Access, kVectors>(args, row, per_lane);
  } else {
    few_rows_columns<W, Norm, Source, NeighbourAccess<Access>>(args, cta - row_ctas);
  }
}

}  // namespace fused_op::cuda
