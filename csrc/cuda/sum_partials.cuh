// What norm_backward_kernel's CTAs leave of the parameter gradients, added up in a fixed order.
// Included by launch_*.cu only; torch-free.
#pragma once

#include "core/pack.h"
#include "cuda/dependent_launch.cuh"
#include "cuda/flexible.cuh"
#include "cuda/row_access.cuh"

namespace fused_op::cuda {

// Where the gradients of weight and bias go; null: not wanted.
struct ParameterGradients {
  void* data[2];
  DType dtype;
  bool add;  // they are f32, and are added to
};

// Column sums of [parts, grads, stride] into the parameters' type. block: (kSumLanes, kSumRows); a
// thread adds up one vector of columns, of every kSumRows-th row.
constexpr int kSumLanes = 8;
constexpr int kSumRows = 16;
template <typename A>
constexpr int kSumCols = kSumLanes * kVector<A>;
template <typename A>
constexpr int kSumShared = kSumRows * kSumCols<A> * static_cast<int>(sizeof(A));  // bytes
template <typename W, typename A>
__global__ void __launch_bounds__(kSumLanes* kSumRows, 4)
    sum_partials_kernel(const A* partials, int parts, int grads, std::int64_t stride,
                        std::int64_t cols, const __grid_constant__ ParameterGradients targets) {
  constexpr int N = kVector<A>;
  void* const target = targets.data[blockIdx.y];
  if (target == nullptr) {
    return;
  }
  __shared__ A sums[kSumRows][kSumCols<A>];
  const std::int64_t first_col = static_cast<std::int64_t>(blockIdx.x) * kSumCols<A>;
  const std::int64_t col = first_col + threadIdx.x * N;
  const std::int64_t row = grads * stride;
  const A* from = partials + threadIdx.y * row + blockIdx.y * stride + col;
  await_kernels_before();
  A sum[N] = {};
  if (col < cols) {
    constexpr int kAtOnce = 9;  // loads in flight: all of them, for 132 parts
    for (int part = threadIdx.y; part < parts; part += kSumRows * kAtOnce) {
      Pack<A, N> addends[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        addends[k] = {};
        load_if(part + k * kSumRows < parts, from, addends[k].words);
        from += kSumRows * row;
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        A values[N];
        unpack(addends[k], values);
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
  const int thread = threadIdx.y * kSumLanes + threadIdx.x;
  if (thread < kSumCols<A> && first_col + thread < cols) {
    A total = 0;
#pragma unroll
    for (int i = 0; i < kSumRows; ++i) {
      total += sums[i][thread];
    }
    finish_gradient<W>(target, targets.dtype, targets.add, first_col + thread, total);
  }
}

}  // namespace fused_op::cuda
