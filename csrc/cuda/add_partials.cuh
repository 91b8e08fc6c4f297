// Adds up, in a fixed order, the partial sums of the parameters' gradients that the CTAs of a
// backward kernel have left. Compiled by nvcc and by NVRTC; torch-free.
#pragma once

#include "core/convert.h"
#include "cuda/access.cuh"
#include "cuda/backward_tile.h"
#include "cuda/dependent_launch.cuh"
#include "cuda/memory.cuh"

namespace fused_op::cuda {

template <typename A>
constexpr int kPartialsCols = kPartialsLanes * kVector<A>;  // columns of a CTA

// Sums over the first dimension of `partials`, [parts, grads, stride]. W is the dtype of the
// parameters. grid: (blocks of columns, grads); block: (kPartialsLanes, kPartialsRows).
template <typename W, typename A>
__global__ void __launch_bounds__(kPartialsLanes* kPartialsRows, 4)
    add_partials_kernel(const A* partials, int parts, int grads, std::int64_t stride,
                        std::int64_t cols, const __grid_constant__ PartialsTargets targets) {
  constexpr int N = kVector<A>;
  constexpr int kAtOnce = 9;  // loads of a thread in flight: all that it has, for 132 parts
  void* const target = targets.data[blockIdx.y];
  if (target == nullptr) {
    return;
  }
  __shared__ A sums[kPartialsRows][kPartialsCols<A>];
  const std::int64_t first_col = static_cast<std::int64_t>(blockIdx.x) * kPartialsCols<A>;
  const std::int64_t col = first_col + threadIdx.x * N;
  const std::int64_t row = grads * stride;
  const A* from = partials + threadIdx.y * row + blockIdx.y * stride + col;
  await_kernels_before();
  A sum[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    sum[j] = 0;
  }
  if (col < cols) {
    for (int part = threadIdx.y; part < parts; part += kPartialsRows * kAtOnce) {
      Pack<A, N> addends[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        clear(addends[k]);
        load_if(part + k * kPartialsRows < parts, from, addends[k].words);
        from += kPartialsRows * row;
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        A values[N];
        to_values(addends[k], values);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          sum[j] += values[j];
        }
      }
    }
  }
#pragma unroll
  for (int j = 0; j < N; ++j) {
    sums[threadIdx.y][threadIdx.x * N + j] = sum[j];
  }
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.y * kPartialsLanes + threadIdx.x);
  if (thread < kPartialsCols<A> && first_col + thread < cols) {
    A total = 0;
#pragma unroll
    for (int i = 0; i < kPartialsRows; ++i) {
      total += sums[i][thread];
    }
    store_gradient<W>(target, first_col + thread, total, targets.add);
  }
}

}  // namespace fused_op::cuda
