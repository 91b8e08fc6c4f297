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
#include "cuda/word_access.cuh"

namespace fused_op::cuda {

// How both kernels read. Whole lines into the L2 cache: H200, bf16, us without and with it, 4.9 4.6
// at 1x262144, 5.6 5.2 at 8x65536.
template <typename Access>
using LongRowAccess =
    std::conditional_t<std::is_same_v<Access, VectorAccess>, LineAccess, NeighbourAccess<Access>>;

// N elements of a flexible row; past its end they are `past` if kClip, else anything.
template <bool kClip, int N, typename A>
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

// x and dy of N elements of a flexible row; past its end, if kClip, x is x_past and dy zero.
template <bool kClip, int N, typename A>
__device__ __forceinline__ void read_terms(const NormBackwardArgs& args, const DropoutState& state,
                                           std::int64_t row, std::int64_t col, A x_past, A (&x)[N],
                                           A (&dy)[N]) {
  read<kClip>(any_row(args.x, row), col, args.cols, x, x_past);
  read<kClip>(any_row(args.grad_output, row), col, args.cols, dy);
  if (args.dropout.active && !args.drops_input) {
    DropoutRow(state, row).apply(args.dropout, col, dy);
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
// 15 us instead of 9 at 8x65536, 35 instead of 9 at 1x262144, bf16, H200.) All vectors of a thread,
// four at most, are loaded at once: one after the other each waited for memory.
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
  const A* const stats = static_cast<const A*>(args.stats);
  PullbackSums<A> sums{};
  const auto add = [&](std::int64_t at, const Normalizer<A>& normalizer, const A(&w)[N], A(&x)[N],
                       const A(&dy)[N]) {
    normalize<Norm, Source>(args, at, normalizer, w, x);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      sums.add(dy[j] * w[j], x[j]);
    }
  };
  if constexpr (Source::kFlexible) {
    await_kernels_before();
    const Normalizer<A> normalizer = Norm::saved(stats, row, args.rows).normalizer();
    const A x_past = args.x_is_output ? A(0) : normalizer.mean;
    const DropoutState state(args.dropout);
#pragma unroll 1
    for (; col < args.cols; col += step) {
      A x[N], dy[N], w[N];
      read_terms<true>(args, state, row, col, x_past, x, dy);
      unpack(parameters_of<W, N>(args.weight, args.param_dtype, col, args.cols, 1), w);
      add(col, normalizer, w, x, dy);
    }
  } else {
    constexpr int kVectors = kPieceVectors / kMaxRowThreads;
    const T* const x_row = row_of<T>(args.x, row);
    const T* const dy_row = row_of<T>(args.grad_output, row);
    await_kernels_before();
    Pack<T, N> x_packs[kVectors], dy_packs[kVectors];
    Pack<W, N> w_packs[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const std::int64_t at = col + i * step;
      x_packs[i] = Access::template load<N>(x_row, at, args.cols);
      dy_packs[i] = Access::template load<N>(dy_row, at, args.cols);
      w_packs[i] = load_parameters<N>(static_cast<const W*>(args.weight), at, args.cols, 1);
    }
    const Normalizer<A> normalizer = Norm::saved(stats, row, args.rows).normalizer();
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const std::int64_t at = col + i * step;
      if (at < args.cols) {
        Access::clip_to(normalizer.mean, args.cols - at, x_packs[i]);
        Access::clip(args.cols - at, dy_packs[i]);
        Access::clip(args.cols - at, w_packs[i]);
        A x[N], dy[N], w[N];
        unpack(x_packs[i], x);
        unpack(dy_packs[i], dy);
        unpack(w_packs[i], w);
        add(at, normalizer, w, x, dy);
      }
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
// What a single row then waited for: loads of the first kernel one after the other, two divisions,
// and stores of two or four bytes. Without all that, 7.9 4.9 at 1x262144, 6.3 5.6 at 8x65536.
template <typename Source>
constexpr int kRowsAtOnce = Source::kFlexible ? 1 : 4;
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
  std::int64_t first_row = 0;
  std::int64_t last_row = args.rows;
  if (gridDim.y > 1) {  // two divisions, which few rows need not wait for
    first_row = args.rows * blockIdx.y / gridDim.y;
    last_row = args.rows * (blockIdx.y + 1) / gridDim.y;
  }
  A w[N];
  A dweight[N] = {};
  A dbias[N] = {};
  await_kernels_before();
  const DropoutState state(args.dropout);
  constexpr int kAtOnce = kRowsAtOnce<Source>;
  Pack<T, N> x_packs[kAtOnce], dy_packs[kAtOnce];
  const auto load_rows = [&](std::int64_t row) {
    if constexpr (!Source::kFlexible) {
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
      const auto saved = Norm::saved(static_cast<const A*>(args.stats), row, args.rows);
      PullbackSums<A> total{};
#pragma unroll 16
      for (unsigned piece = 0; piece < pieces; ++piece) {
        const PullbackSums<A> sums = row_sums[row * pieces + piece];
        total.wdy_xhat += sums.wdy_xhat;
        total.wdy += sums.wdy;
      }
      totals[threadIdx.x] = total;
      normalizers[threadIdx.x] = saved.normalizer();
    }
    __syncthreads();
    const auto take_row = [&](int r, int k) {
      const std::int64_t row = first + r;
      const Normalizer<A> normalizer = normalizers[r];
      const Pullback<Norm, A> pullback(totals[r], normalizer, inverse_cols);
      A xhat[N], dy[N], dx[N];
      if constexpr (Source::kFlexible) {
        read_terms<false>(args, state, row, col, A(0), xhat, dy);
      } else {
        unpack(x_packs[k], xhat);
        unpack(dy_packs[k], dy);
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
        if constexpr (Source::kFlexible) {
          read<false>(any_row(args.grad_sum, row), col, args.cols, dy);
        } else {
          unpack(Access::template load<N>(row_of<T>(args.grad_sum, row), col, args.cols), dy);
        }
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
            if constexpr (Access::kWholePacks) {
              store_pack_if(col < args.cols, dx_row + col, result[0]);
            } else {
              Access::template store_row<kWarpSize>(dx_row, col, args.cols, result);
            }
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
      store_pack_if(col < stride, partials + (part + grad) * stride + col, as_pack(sums));
    } else if (gradient != nullptr) {
      if constexpr (!kIsFlexible<W>) {
        if (col + N <= args.cols) {
          store_pack_if(true, static_cast<W*>(gradient) + col, pack_from<W, N>(sums));
          return;
        }
      }
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
