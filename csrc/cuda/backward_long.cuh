// Backward of rows too long for one CTA's registers, in two kernels that read x and dy twice: the
// two sums of each row, then dx and the parameter gradients by columns. Included by launch_*.cu
// only; torch-free.
#pragma once

#include "core/norm_args.h"
#include "core/row_source.h"
#include "cuda/backward.cuh"
#include "cuda/row_access.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/row_tile.h"

namespace fused_op::cuda {

// First step: the two sums of each row. One CTA a row.
template <typename W, typename Norm, typename Source, typename Access>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    norm_backward_row_sums_kernel(const __grid_constant__ NormBackwardArgs args,
                                  PullbackSums<Accumulator<typename Source::Element>>* row_sums) {
  using T = typename Source::Element;
  using A = Accumulator<T>;
  constexpr int N = kVector<T>;
  constexpr int kWarps = kMaxRowThreads / kWarpSize;

  const std::int64_t row = blockIdx.x;
  const Normalizer<A> normalizer =
      Norm::saved(static_cast<const A*>(args.stats), row, args.rows).normalizer();
  const T* x_row = row_of<T>(args.x, row);
  const T* dy_row = row_of<T>(args.grad_output, row);
  const W* weight = static_cast<const W*>(args.weight);

  PullbackSums<A> sums{};
#pragma unroll 4
  for (std::int64_t col = static_cast<std::int64_t>(threadIdx.x) * N; col < args.cols;
       col += kMaxRowThreads * N) {
    A x[N], dy[N], w[N];
    Pack<T, N> x_pack = Access::template load<N>(x_row, col, args.cols);
    Pack<T, N> dy_pack = Access::template load<N>(dy_row, col, args.cols);
    Pack<W, N> w_pack = load_parameters<N>(weight, col, args.cols, 1);
    Access::clip(args.cols - col, x_pack, dy_pack);
    Access::clip(args.cols - col, w_pack);
    unpack(x_pack, x);
    unpack(dy_pack, dy);
    unpack(w_pack, w);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      sums.add(dy[j] * w[j], Norm::normalized(x[j], normalizer));
    }
  }
  __shared__ PullbackSums<A> parts[kWarps];
  sums.wdy_xhat = lane_sum<kWarpSize>(sums.wdy_xhat);
  sums.wdy = lane_sum<kWarpSize>(sums.wdy);
  if (threadIdx.x % kWarpSize == 0) {
    parts[threadIdx.x / kWarpSize] = sums;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kWarps; ++w) {
      sums.wdy_xhat += parts[w].wdy_xhat;
      sums.wdy += parts[w].wdy;
    }
    row_sums[row] = sums;
  }
}

// Second step: a thread owns N columns and walks over the rows of its chunk. grid: (column slabs,
// row chunks); partials: [row chunks, Norm::kGrads, partial_stride(cols)].
constexpr int kColumnThreads = 128;
template <typename W, typename Norm, typename Source, typename Access>
__global__ void __launch_bounds__(kColumnThreads) norm_backward_columns_kernel(
    const __grid_constant__ NormBackwardArgs args,
    const PullbackSums<Accumulator<typename Source::Element>>* row_sums,
    Accumulator<typename Source::Element>* partials) {
  using T = typename Source::Element;
  using A = Accumulator<T>;
  constexpr int N = kVector<T>;

  const std::int64_t col =
      (static_cast<std::int64_t>(blockIdx.x) * kColumnThreads + threadIdx.x) * N;
  const A inverse_cols = reciprocal(static_cast<A>(args.cols));
  const A* stats = static_cast<const A*>(args.stats);
  const W* weight = static_cast<const W*>(args.weight);
  A w[N];
  A dweight[N] = {};
  A dbias[N] = {};
  unpack(load_parameters<N>(weight, col, args.cols, 1), w);
  const std::int64_t last_row = args.rows * (blockIdx.y + 1) / gridDim.y;
#pragma unroll(sizeof(A) == 4 ? 2 : 1)
  for (std::int64_t row = args.rows * blockIdx.y / gridDim.y; row < last_row; ++row) {
    const T* x_row = row_of<T>(args.x, row);
    const T* dy_row = row_of<T>(args.grad_output, row);
    const Normalizer<A> normalizer = Norm::saved(stats, row, args.rows).normalizer();
    const Pullback<Norm, A> pullback(row_sums[row], normalizer, inverse_cols);
    A x[N], dy[N], dx[N];
    unpack(Access::template load<N>(x_row, col, args.cols), x);
    unpack(Access::template load<N>(dy_row, col, args.cols), dy);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const A xhat = Norm::normalized(x[j], normalizer);
      dweight[j] = multiply_add(dy[j], xhat, dweight[j]);
      dbias[j] += dy[j];
      dx[j] = pullback(dy[j] * w[j], xhat);
    }
    if constexpr (Source::kGradStreams == 3) {
      const T* sum_row = row_of<T>(args.grad_sum, row);
      unpack(Access::template load<N>(sum_row, col, args.cols), dy);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        dx[j] += dy[j];
      }
    }
    if (args.grad_input != nullptr) {
      T* dx_row = static_cast<T*>(args.grad_input) + row * args.cols;
      const Pack<T, N> result[1] = {pack_from<T, N>(dx)};
      Access::template store_row<kWarpSize>(dx_row, col, args.cols, result);
    }
  }
  if (partials != nullptr) {
    const std::int64_t stride = partial_stride<T>(args.cols);
    A* const target = partials + static_cast<std::int64_t>(blockIdx.y) * Norm::kGrads * stride;
    VectorAccess::store(target, col, stride, as_pack(dweight));
    if constexpr (Norm::kGrads == 2) {
      VectorAccess::store(target + stride, col, stride, as_pack(dbias));
    }
  }
}

}  // namespace fused_op::cuda
