// The forward kernels. A row is read once and kept in registers, packed as it came; its moments are
// taken in two passes over the registers; then it is normalised, scaled and stored.
// norm_forward_kernel holds a row in one CTA's registers, norm_forward_streamed_kernel takes rows
// of any length. Included by the launch_*.cu files only; torch-free.
#pragma once

#include "core/norm_args.h"
#include "core/row_source.h"
#include "cuda/row_access.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/row_tile.h"

namespace fused_op::cuda {

// Moments of this lane's `count`-element share of a group of kLanes lanes, valid in every lane.
// Elements past the row's end are zero on entry and stay out of the deviations.
// `left` columns of the row begin at this lane's first element; its vectors are kLanes apart.
template <typename Norm, typename Access, int kLanes, int kVectors, int N, typename T, typename A>
__device__ __forceinline__ Moments<A> group_moments(const Pack<T, N> (&row)[kVectors], int left,
                                                    A count, A scale) {
  Moments<A> moments{};
  const A inverse_count = count > A(0) ? A(1) / count : A(0);
  if constexpr (Norm::kCentered) {
    A sum = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      A x[N];
      A part = 0;  // short chains of sums: a long one lets the scheduler unpack the row ahead of it
      unpack(row[i], x);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        part = multiply_add(x[j], scale, part);
      }
      sum += part;
    }
    moments.mean = lane_sum<kLanes>(sum) * inverse_count;
  }
  A rest = 0;
  A second = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    A x[N];
    A rest_part = 0;
    A second_part = 0;
    unpack(row[i], x);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const A deviation = multiply_add(x[j], scale, -moments.mean);
      if (i * kLanes * N + (Access::kWholePacks ? 0 : j) < left) {
        // 16-bit elements cannot tell means apart that differ by float's rounding.
        if constexpr (Norm::kCentered && sizeof(T) >= 4) {
          rest_part += deviation;
        }
        second_part = multiply_add(deviation, deviation, second_part);
      }
    }
    rest += rest_part;
    second += second_part;
  }
  if constexpr (Norm::kCentered && sizeof(T) >= 4) {
    moments.rest = lane_sum<kLanes>(rest) * inverse_count;
  }
  moments.second = lane_sum<kLanes>(second) - count * moments.rest * moments.rest;
  return moments;
}

// The same times a power of two, for a row whose squares overflowed: read again from memory, one
// pack at a time, since nothing of the common path may pay for it in registers.
template <typename Norm, typename Access, int kLanes, int kVectors, int N, typename T, typename A>
__device__ __forceinline__ Moments<A> rescued_moments(const T* row, int first_col, int width,
                                                      A count) {
  constexpr A kScale = Rescue<A>::kScale;
  const A inverse_count = count > A(0) ? A(1) / count : A(0);
  Moments<A> moments{};
  for (int pass = Norm::kCentered ? 0 : 1; pass < 2; ++pass) {
    A sum = 0;
    A rest = 0;
#pragma unroll 1
    for (int i = 0; i < kVectors; ++i) {
      const int col = first_col + i * kLanes * N;
      A x[N];
      unpack(Access::template load<N>(row, col, width), x);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const A deviation = multiply_add(x[j], kScale, -moments.mean);
        if (col + (Access::kWholePacks ? 0 : j) < width) {
          rest += deviation;
          sum += pass == 0 ? deviation : deviation * deviation;
        }
      }
    }
    sum = lane_sum<kLanes>(sum);
    if (pass == 0) {
      moments.mean = sum * inverse_count;
    } else {
      moments.rest = Norm::kCentered ? lane_sum<kLanes>(rest) * inverse_count : A(0);
      moments.second = sum - count * moments.rest * moments.rest;
    }
  }
  return moments;
}

// The output of one vector.
template <typename W, typename Norm, typename Access, int N, typename T, typename A, typename Col>
__device__ __forceinline__ void store_normalized(const NormForwardArgs& args, T* output,
                                                 const Pack<T, N>& pack, Col col, Col width,
                                                 const Normalizer<A>& normalizer) {
  A x[N], w[N], b[N];
  unpack(pack, x);
  unpack(Access::template load_or<N>(static_cast<const W*>(args.weight), col, width, 1), w);
  if constexpr (Norm::kCentered) {
    unpack(Access::template load_or<N>(static_cast<const W*>(args.bias), col, width, 0), b);
  }
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const A xhat = Norm::normalized(x[j], normalizer);
    x[j] = Norm::kCentered ? multiply_add(xhat, w[j], b[j]) : xhat * w[j];
  }
  Access::store(output, col, width, pack_from<T, N>(x));
}

// How many of the `most` columns from `col` on are in the row.
__device__ __forceinline__ int valid_elements(std::int64_t col, std::int64_t cols, int most) {
  const std::int64_t left = cols - col;
  return left <= 0 ? 0 : left < most ? static_cast<int>(left) : most;
}

// grid: enough CTAs for all rows; block: whole rows (one row if it takes more than one warp).
template <typename W, typename Norm, typename Source, typename Access, typename Tile>
__global__ void __launch_bounds__(ForwardBounds<Tile, Access>::kThreads,
                                  ForwardBounds<Tile, Access>::kCtasPerSm)
    norm_forward_kernel(const __grid_constant__ NormForwardArgs args) {
  using T = typename Source::Element;
  using A = Accumulator<T>;
  constexpr int N = kVector<T>;
  constexpr int kLanes = Tile::kLanes;
  constexpr int kVectors = Tile::kVectors;

  const int warps = row_warps<Tile>((args.cols + N - 1) / N);
  const int row_threads = kLanes * warps;
  const int lane = threadIdx.x % kLanes;
  const int warp = warps == 1 ? 0 : threadIdx.x / kWarpSize;
  const std::int64_t my_row = static_cast<std::int64_t>(blockIdx.x) * (blockDim.x / row_threads) +
                              threadIdx.x / row_threads;
  const bool live = my_row < args.rows;  // the others shuffle along and store nothing
  const std::int64_t row = live ? my_row : args.rows - 1;

  const Source source(args, row);
  const int width = static_cast<int>(args.cols);  // a row that fits into registers is short
  const int first_col = (warp * kVectors * kLanes + lane) * N;
  const auto col_of = [&](int i) { return first_col + i * kLanes * N; };
  Pack<T, N> packs[kVectors];
  constexpr int kBatch = kVectors < 4 ? kVectors : 4;  // loads in flight before the first use
#pragma unroll
  for (int first = 0; first < kVectors; first += kBatch) {
    typename Source::template Fetched<N> fetched[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      fetched[i] = source.template fetch<Access, N>(col_of(first + i), width);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      packs[first + i] =
          source.template finish<Access, N>(fetched[i], col_of(first + i), live ? width : 0);
    }
  }

  __shared__ WarpMoments<A> parts[kMaxRowThreads / kWarpSize];
  const A cols = static_cast<A>(args.cols);
  const A inverse_cols = A(1) / cols;
  constexpr int kWarpCols = kVectors * kLanes * N;
  const A count = static_cast<A>(min(width - warp * kWarpCols, kWarpCols));
  const auto merged = [&](const Moments<A>& mine) {
    if (warps == 1) {
      return mine;
    }
    if (lane == 0) {
      parts[warp] = {count, mine};
    }
    __syncthreads();
    const WarpMoments<A> part = lane < warps ? parts[lane] : WarpMoments<A>{};
    return merge_moments<Norm::kCentered>(part, cols, inverse_cols);
  };
  A scale = 1;
  Moments<A> moments =
      merged(group_moments<Norm, Access, kLanes>(packs, width - first_col, count, scale));
  // The same decision in every thread of a row; rows that share a warp go together.
  if (__any_sync(kAllLanes, overflowed(moments))) {
    if (warps > 1) {
      __syncthreads();  // parts is read by all before it is written again
    }
    const Moments<A> rescued = merged(
        rescued_moments<Norm, Access, kLanes, kVectors, N>(source.row(), first_col, width, count));
    if (overflowed(moments)) {
      moments = rescued;
      scale = Rescue<A>::kScale;
    }
  }
  const Normalizer<A> normalizer =
      Norm::normalizer(moments, scale, inverse_cols, static_cast<A>(args.eps));
  if (!live) {
    return;
  }
  if (args.stats != nullptr && lane == 0 && warp == 0) {
    Norm::save(normalizer, moments, static_cast<A*>(args.stats), row, args.rows);
  }
  T* output = static_cast<T*>(args.output) + row * args.cols;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    store_normalized<W, Norm, Access>(args, output, packs[i], col_of(i), width, normalizer);
  }
}

// Appends `next` to the moments of a warp's share so far.
template <typename A>
__device__ __forceinline__ WarpMoments<A> append(const WarpMoments<A>& so_far,
                                                 const WarpMoments<A>& next) {
  const A count = so_far.count + next.count;
  if (count == A(0)) {
    return so_far;
  }
  const Moments<A>& a = so_far.moments;
  const Moments<A>& b = next.moments;
  const A difference = (b.mean - a.mean) + (b.rest - a.rest);
  const A step = difference * (next.count / count);
  const A mean = a.mean + step;
  return {count,
          {mean, a.rest + (step - (mean - a.mean)),
           a.second + b.second + difference * step * so_far.count}};
}

// Rows longer than the registers of a CTA: one CTA a row, read a second time for the output.
template <typename W, typename Norm, typename Source, typename Access>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    norm_forward_streamed_kernel(const __grid_constant__ NormForwardArgs args) {
  using T = typename Source::Element;
  using A = Accumulator<T>;
  constexpr int N = kVector<T>;
  constexpr int kVectors = 2;
  constexpr int kWarps = kMaxRowThreads / kWarpSize;
  constexpr int kWarpCols = kVectors * kWarpSize * N;

  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const std::int64_t row = blockIdx.x;
  const Source source(args, row);
  const A cols = static_cast<A>(args.cols);
  const A inverse_cols = A(1) / cols;

  __shared__ WarpMoments<A> parts[kWarps];
  Moments<A> moments;
  A scale = 1;
  while (true) {
    WarpMoments<A> mine{};
    for (std::int64_t begin = warp * kWarpCols; begin < args.cols; begin += kWarps * kWarpCols) {
      Pack<T, N> packs[kVectors];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const std::int64_t col = begin + (i * kWarpSize + lane) * N;
        packs[i] = source.template finish<Access, N>(
            source.template fetch<Access, N>(col, args.cols), col, args.cols);
      }
      const int in_row = valid_elements(begin, args.cols, kWarpCols);
      const A count = static_cast<A>(in_row);
      mine = append(mine, {count, group_moments<Norm, Access, kWarpSize>(packs, in_row - lane * N,
                                                                         count, scale)});
    }
    if (lane == 0) {
      parts[warp] = mine;
    }
    __syncthreads();
    moments = merge_moments<Norm::kCentered>(lane < kWarps ? parts[lane] : WarpMoments<A>{}, cols,
                                             inverse_cols);
    if (!overflowed(moments) || scale != A(1)) {
      break;
    }
    scale = Rescue<A>::kScale;
    __syncthreads();  // parts is read by all before it is written again
  }
  const Normalizer<A> normalizer =
      Norm::normalizer(moments, scale, inverse_cols, static_cast<A>(args.eps));
  if (args.stats != nullptr && threadIdx.x == 0) {
    Norm::save(normalizer, moments, static_cast<A*>(args.stats), row, args.rows);
  }

  const T* values = source.row();
  T* output = static_cast<T*>(args.output) + row * args.cols;
  for (std::int64_t begin = warp * kWarpCols; begin < args.cols; begin += kWarps * kWarpCols) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const std::int64_t col = begin + (i * kWarpSize + lane) * N;
      store_normalized<W, Norm, Access>(args, output,
                                        Access::template load<N>(values, col, args.cols), col,
                                        args.cols, normalizer);
    }
  }
}

}  // namespace fused_op::cuda
