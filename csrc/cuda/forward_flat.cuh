// The forward of rows shorter than one vector, of which norm_forward_kernel's lanes would mostly be
// empty: a CTA takes its rows as one aligned span, through shared memory, a thread a row at a time.
// The same bits. H200, bf16, 4194304 rows of 1, 2, 3, 4, there and here: 62 66 63 63 us, 19 23
// 33 35. Included by launch_*.cu only; torch-free.
#pragma once

#include "core/norm_args.h"
#include "cuda/dependent_launch.cuh"
#include "cuda/forward.cuh"
#include "cuda/row_access.cuh"

namespace fused_op::cuda {

constexpr int kFlatThreads = 256;
constexpr int kFlatRows = 4 * kFlatThreads;  // of a CTA

// Rows of at most kMaxCols columns, dense and one after the other.
template <typename W, typename Norm, typename T, int kMaxCols>
__global__ void __launch_bounds__(kFlatThreads)
    norm_forward_flat_kernel(const __grid_constant__ NormForwardArgs args) {
  using A = Accumulator<T>;
  constexpr int N = kVector<T>;
  const int width = static_cast<int>(args.cols);
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.x) * kFlatRows;
  const int rows = static_cast<int>(min(args.rows - first_row, std::int64_t{kFlatRows}));
  const int span = rows * width;

  await_kernels_before();
  __shared__ Pack<T, N> packs[kFlatRows * kMaxCols / N];
  const T* const input = static_cast<const T*>(args.input.data) + first_row * width;
  for (int i = threadIdx.x; (i + 1) * N <= span; i += kFlatThreads) {
    packs[i] = VectorAccess::load<N>(input, i * N, span);
  }
  T* const values = reinterpret_cast<T*>(packs);
  const int rest = span / N * N + threadIdx.x;  // less than a pack, of the last rows
  if (rest < span) {
    values[rest] = input[rest];
  }
  const W* const weights = static_cast<const W*>(args.weight);
  const W* const biases = static_cast<const W*>(args.bias);
  A weight[kMaxCols], bias[kMaxCols];
#pragma unroll
  for (int j = 0; j < kMaxCols; ++j) {
    weight[j] = weights != nullptr && j < width ? static_cast<A>(weights[j]) : A(1);
    bias[j] = biases != nullptr && j < width ? static_cast<A>(biases[j]) : A(0);
  }
  const A cols = static_cast<A>(width);
  const A inverse_cols = reciprocal(cols);
  const A eps = static_cast<A>(args.eps);
  __syncthreads();

  for (int row = threadIdx.x; row < rows; row += kFlatThreads) {
    T* const mine = values + row * width;
    T x[kMaxCols];
#pragma unroll
    for (int j = 0; j < kMaxCols; ++j) {
      x[j] = j < width ? mine[j] : static_cast<T>(0.0f);
    }
    const Pack<T, kMaxCols> pack[1] = {as_pack(x)};
    const auto moments_of = [&](A scale, bool refined) {
      return group_moments<Norm, ShiftedAccess, 1>(pack, width, cols, scale, refined);
    };
    Moments<A> moments = moments_of(A(1), false);
    A scale = 1;
    if (!trusted(moments, cols)) {  // as in finish_untrusted
#pragma unroll 1
      for (int attempt = 0; attempt < 2 && (attempt == 0 || overflowed(moments)); ++attempt) {
        scale = attempt == 0 ? A(1) : Limits<A>::kScale;
        moments = append(WarpMoments<A>{}, {cols, moments_of(scale, true)}).moments;
      }
    }
    const Normalizer<A> normalizer = Norm::normalizer(moments, scale, inverse_cols, eps);
    if (args.stats != nullptr) {
      Norm::save(normalizer, moments, static_cast<A*>(args.stats), first_row + row, args.rows);
    }
#pragma unroll
    for (int j = 0; j < kMaxCols; ++j) {
      if (j < width) {
        const A xhat = Norm::normalized(static_cast<A>(x[j]), normalizer);
        mine[j] = static_cast<T>(Norm::kCentered ? multiply_add(xhat, weight[j], bias[j])
                                                 : xhat * weight[j]);
      }
    }
  }
  __syncthreads();

  T* const output = static_cast<T*>(args.output.data) + first_row * width;
  for (int i = threadIdx.x; (i + 1) * N <= span; i += kFlatThreads) {
    VectorAccess::store(output, i * N, span, packs[i]);
  }
  if (rest < span) {
    output[rest] = values[rest];
  }
}

}  // namespace fused_op::cuda
