// Backward of rows too long for one CTA's registers, in two kernels that read x and dy twice: the
// two sums of each row, then dx and the parameter gradients by columns. Included by launch_*.cu
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

namespace fused_op::cuda {

// A row to read, and N of its elements; past the row's end they are `past` if kClip, else anything.
template <typename Source>
__device__ __forceinline__ auto reader_of(const ConstRows& rows, std::int64_t row) {
  if constexpr (Source::kFlexible) {
    return any_row(rows, row);
  } else {
    return row_of<typename Source::Element>(rows, row);
  }
}
template <typename Access, bool kClip, int N, typename T>
__device__ __forceinline__ void read(const T* row, std::int64_t col, std::int64_t cols,
                                     Accumulator<T> (&values)[N], Accumulator<T> past = 0) {
  Pack<T, N> pack = Access::template load<N>(row, col, cols);
  if constexpr (kClip) {
    Access::clip_to(past, cols - col, pack);
  }
  unpack(pack, values);
}
template <typename, bool kClip, int N, typename A>
__device__ __forceinline__ void read(const AnyRow& row, std::int64_t col, std::int64_t cols,
                                     A (&values)[N], A past = 0) {
  to_values(load_raw<N, A>(row, col, cols), row.dtype, values);
  if constexpr (kClip) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      values[j] = col + j < cols ? values[j] : past;
    }
  }
}

// x and dy of N elements; past the row's end x is x_past, and dy zero.
template <typename Source, typename Access, bool kClip, int N, typename Reader, typename A>
__device__ __forceinline__ void read_terms(const NormBackwardArgs& args, const Reader& x_row,
                                           const Reader& dy_row, const DropoutState& state,
                                           std::int64_t row, std::int64_t col, A x_past, A (&x)[N],
                                           A (&dy)[N]) {
  read<Access, kClip>(x_row, col, args.cols, x, x_past);
  read<Access, kClip>(dy_row, col, args.cols, dy);
  if constexpr (Source::kFlexible) {
    if (args.dropout.active && !args.drops_input) {
      DropoutRow(state, row).apply(args.dropout, col, dy);
    }
  }
}
template <typename Norm, typename Source, int N, typename A>
__device__ __forceinline__ void normalize(const NormBackwardArgs& args, std::int64_t col,
                                          const Normalizer<A>& normalizer, const A (&weight)[N],
                                          A (&x)[N]) {
  if (Source::kFlexible && args.x_is_output) {
    xhat_of_output(args, col, weight, x);
    return;
  }
#pragma unroll
  for (int j = 0; j < N; ++j) {
    x[j] = Norm::normalized(x[j], normalizer);
  }
}

// First step: the two sums of each row, a CTA for each of its pieces. row_sums: [rows, pieces]. The
// pieces are taken in turn, and their number is a function of the row's length alone. (A CTA a row:
// 15 us instead of 9 at 8x65536, 35 instead of 9 at 1x262144, bf16, H200.)
constexpr int kPieceVectors = kMaxRowThreads * 4;
FUSED_OP_HD constexpr unsigned row_pieces(std::int64_t vectors) {
  return static_cast<unsigned>((vectors + kPieceVectors - 1) / kPieceVectors);
}
template <typename W, typename Norm, typename Source, typename Access>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    norm_backward_row_sums_kernel(const __grid_constant__ NormBackwardArgs args,
                                  PullbackSums<Accumulator<typename Source::Element>>* row_sums) {
  using T = typename Source::Element;
  using A = Accumulator<T>;
  constexpr int N = Source::kElements;
  constexpr int kWarps = kMaxRowThreads / kWarpSize;

  const unsigned pieces = row_pieces((args.cols + N - 1) / N);
  const std::int64_t row = blockIdx.x / pieces;
  const unsigned piece = blockIdx.x % pieces;
  const std::int64_t step = static_cast<std::int64_t>(pieces) * kMaxRowThreads * N;
  std::int64_t col = (static_cast<std::int64_t>(piece) * kMaxRowThreads + threadIdx.x) * N;
  if constexpr (!Source::kFlexible) {
    if (blockIdx.x < kPrefetchingCtas) {
      for (std::int64_t at = col; at < args.cols; at += step) {
        prefetch(row_of<T>(args.x, row) + at);
        prefetch(row_of<T>(args.grad_output, row) + at);
        if (row == 0 && args.weight != nullptr) {  // for all rows
          prefetch(static_cast<const W*>(args.weight) + at);
        }
      }
    }
  }
  await_kernels_before();
  const Normalizer<A> normalizer =
      Norm::saved(static_cast<const A*>(args.stats), row, args.rows).normalizer();
  const auto x_row = reader_of<Source>(args.x, row);
  const auto dy_row = reader_of<Source>(args.grad_output, row);

  const A x_past = Source::kFlexible && args.x_is_output ? A(0) : normalizer.mean;
  const DropoutState state(args.dropout);
  PullbackSums<A> sums{};
#pragma unroll(Source::kFlexible ? 1 : 4)
  for (; col < args.cols; col += step) {
    A xhat[N], dy[N], w[N];
    read_terms<Source, Access, true>(args, x_row, dy_row, state, row, col, x_past, xhat, dy);
    auto w_pack = parameters_of<W, N>(args.weight, args.param_dtype, col, args.cols, 1);
    if constexpr (Access::kSharesBlocks) {
      Access::clip(args.cols - col, w_pack);
    }
    unpack(w_pack, w);
    normalize<Norm, Source>(args, col, normalizer, w, xhat);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      sums.add(dy[j] * w[j], xhat[j]);
    }
  }
  __shared__ PullbackSums<A> parts[kWarps];
  sums = row_sum<Norm, kWarpSize, kWarps, InTurn>(sums, parts, 0, threadIdx.x / kWarpSize, kWarps);
  if (threadIdx.x == 0) {
    row_sums[blockIdx.x] = sums;
  }
}

// Second step: a thread owns N columns and walks over the rows of its chunk. grid: (column slabs,
// row chunks); partials: [row chunks, Norm::kGrads, partial_stride(cols)], or null where one chunk
// is all rows.
constexpr int kColumnThreads = 128;
// Rows whose x and dy a thread loads at once, the first ones before it knows their sums. H200,
// bf16, us with two, one of them after its sums, and so: 8.6 7.8 at 8x65536, 11.6 9.9 at 16x65536.
template <typename Source>
constexpr int kRowsAtOnce =
    Source::kFlexible || sizeof(Accumulator<typename Source::Element>) == 8 ? 1 : 4;
template <typename W, typename Norm, typename Source, typename Access>
__global__ void __launch_bounds__(kColumnThreads) norm_backward_columns_kernel(
    const __grid_constant__ NormBackwardArgs args,
    const PullbackSums<Accumulator<typename Source::Element>>* row_sums,
    Accumulator<typename Source::Element>* partials) {
  using T = typename Source::Element;
  using A = Accumulator<T>;
  constexpr int N = Source::kElements;

  const std::int64_t col =
      (static_cast<std::int64_t>(blockIdx.x) * kColumnThreads + threadIdx.x) * N;
  const A inverse_cols = reciprocal(static_cast<A>(args.cols));
  const unsigned pieces = row_pieces((args.cols + N - 1) / N);
  await_kernels_before();
  A w[N];
  A dweight[N] = {};
  A dbias[N] = {};
  const DropoutState state(args.dropout);
  const std::int64_t first_row = args.rows * blockIdx.y / gridDim.y;
  const std::int64_t last_row = args.rows * (blockIdx.y + 1) / gridDim.y;
  constexpr int kAtOnce = kRowsAtOnce<Source>;
  Pack<T, N> x_packs[kAtOnce], dy_packs[kAtOnce];
  const auto load_rows = [&](std::int64_t row) {
    if constexpr (kAtOnce > 1) {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const std::int64_t width = row + k < last_row ? args.cols : 0;
        x_packs[k] = Access::template load<N>(row_of<T>(args.x, row + k), col, width);
        dy_packs[k] = Access::template load<N>(row_of<T>(args.grad_output, row + k), col, width);
      }
    }
  };
  load_rows(first_row);
  unpack(parameters_of<W, N>(args.weight, args.param_dtype, col, args.cols, 1), w);
  // What is the same in all columns of a row, of as many rows as there are threads.
  __shared__ Normalizer<A> normalizers[kColumnThreads];
  __shared__ PullbackSums<A> totals[kColumnThreads];
#pragma unroll 1
  for (std::int64_t first = first_row; first < last_row; first += kColumnThreads) {
    const int rows = static_cast<int>(min(last_row - first, std::int64_t{kColumnThreads}));
    __syncthreads();  // read by all before it is written again
    if (threadIdx.x < rows) {
      const std::int64_t row = first + threadIdx.x;
      normalizers[threadIdx.x] =
          Norm::saved(static_cast<const A*>(args.stats), row, args.rows).normalizer();
      PullbackSums<A> total{};
#pragma unroll 16
      for (unsigned piece = 0; piece < pieces; ++piece) {
        const PullbackSums<A> sums = row_sums[row * pieces + piece];
        total.wdy_xhat += sums.wdy_xhat;
        total.wdy += sums.wdy;
      }
      totals[threadIdx.x] = total;
    }
    __syncthreads();
    const auto take_row = [&](int r, int k) {
      const std::int64_t row = first + r;
      const Normalizer<A> normalizer = normalizers[r];
      const Pullback<Norm, A> pullback(totals[r], normalizer, inverse_cols);
      A xhat[N], dy[N], dx[N];
      if constexpr (kAtOnce > 1) {
        unpack(x_packs[k], xhat);
        unpack(dy_packs[k], dy);
      } else {
        read_terms<Source, Access, false>(args, reader_of<Source>(args.x, row),
                                          reader_of<Source>(args.grad_output, row), state, row, col,
                                          A(0), xhat, dy);
      }
      normalize<Norm, Source>(args, col, normalizer, w, xhat);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        dweight[j] = multiply_add(dy[j], xhat[j], dweight[j]);
        dbias[j] += dy[j];
        dx[j] = pullback(dy[j] * w[j], xhat[j]);
      }
      if (Source::kFlexible || Source::kDrops ? args.grad_sum.data != nullptr
                                              : Source::kGradStreams == 3) {
        read<Access, false>(reader_of<Source>(args.grad_sum, row), col, args.cols, dy);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          dx[j] += dy[j];
        }
      }
      if constexpr (Source::kFlexible) {
        store_row_gradients(args, state, row, col, args.cols, dx);
      } else {
        const auto store = [&](const Rows& to) {
          if (to.data != nullptr) {
            const Pack<T, N> result[1] = {pack_from<T, N>(dx)};
            T* const dx_row = static_cast<T*>(to.data) + row * args.cols;
            Access::template store_row<kWarpSize>(dx_row, col, args.cols, result);
          }
        };
        if constexpr (Source::kDrops) {
          store(args.grad_residual);
          DropoutRow(state, row).apply(args.dropout, col, dx);
        }
        store(args.grad_input);
      }
    };
#pragma unroll 1
    for (int r = 0; r < rows; r += kAtOnce) {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (r + k < rows) {
          take_row(r + k, k);
        }
      }
      load_rows(first + r + kAtOnce);
    }
  }
  const std::int64_t stride = partial_stride<Source>(args.cols);
  const std::int64_t part = static_cast<std::int64_t>(blockIdx.y) * Norm::kGrads;
  const auto store_sums = [&](int grad, void* gradient, const A(&sums)[N]) {
    if (partials != nullptr) {
      VectorAccess::store(partials + (part + grad) * stride, col, stride, as_pack(sums));
    } else if (gradient != nullptr) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (col + j < args.cols) {
          store_gradient<W>(gradient, args.param_dtype, col + j, sums[j]);
        }
      }
    }
  };
  store_sums(0, args.grad_weight, dweight);
  if constexpr (Norm::kGrads == 2) {
    store_sums(1, args.grad_bias, dbias);
  }
}

}  // namespace fused_op::cuda
