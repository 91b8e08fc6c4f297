// The backward kernels. norm_backward_kernel reads x and dy once: rows go through shared memory,
// copied ahead by cp.async; each thread reads back only what it copied, so that staging needs no
// barrier. dx leaves at once; the parameter gradients stay in registers over all rows of a CTA and
// leave as one row of partial sums each, which sum_partials_kernel adds in a fixed order. No
// atomics. Rows too long for that take two kernels: row sums, then columns. Included by launch_*.cu
// only.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "core/norm_args.h"
#include "core/row_source.h"
#include "cuda/forward.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/row_tile.h"

namespace fused_op::cuda {

// What norm_backward_kernel keeps of a row, as 16-byte slots per thread.
template <typename W, typename Source, typename Tile>
struct BackwardLayout {
  using T = typename Source::Element;
  static constexpr int N = kVector<T>;
  // Weight in registers up to this size, in shared memory above: the accumulators need the rest.
  static constexpr bool kWeightInRegisters = Tile::kVectors * N * sizeof(W) <= 32;
  static constexpr int kWeightSlotsPerVector =
      kWeightInRegisters ? 0 : N * sizeof(W) / kVectorBytes;
  static constexpr int kStageSlots = Source::kGradStreams * Tile::kVectors;
  // Rows in flight: three where the longest row of the tile leaves room for them.
  static constexpr int slots(int stages) {
    return stages * kStageSlots + Tile::kVectors * kWeightSlotsPerVector;
  }
  static constexpr int kStages = slots(3) * kMaxRowThreads * kVectorBytes <= 226 * 1024 ? 3 : 2;
  static constexpr int kSlots = slots(kStages);
  // Registers: 128 a thread for several vectors, 85 for one.
  static constexpr bool kLight = Tile::kVectors == 1 && sizeof(Accumulator<T>) == 4;
  static constexpr int kThreads = kLight ? 256 : kMaxRowThreads;
  static constexpr int kCtasPerSm = kLight ? 3 : 1;
};

// One 16-byte slot per thread and index; neighbouring threads have neighbouring slots, so that a
// warp's access is conflict-free.
struct ThreadSlots {
  uint4* base;
  template <typename P>
  __device__ __forceinline__ P* at(int slot) const {
    return reinterpret_cast<P*>(base + slot * blockDim.x + threadIdx.x);
  }
};

template <typename Access, int N, typename T>
__device__ __forceinline__ void copy_ahead(Pack<T, N>* slot, const T* row, int col, int width) {
  if constexpr (Access::kWholePacks) {
    __pipeline_memcpy_async(slot, row + col, sizeof(*slot));
  } else {
    T* const elements = reinterpret_cast<T*>(slot);
#pragma unroll 1  // several loads at once spill beside the sums
    for (int j = 0; j < N; ++j) {
      elements[j] = col + j < width ? row[col + j] : static_cast<T>(0.0f);
    }
  }
}

// partials: [gridDim.x, Norm::kGrads, cols], or null when no parameter gradient is wanted.
template <typename W, typename Norm, typename Source, typename Access, typename Tile>
__global__ void __launch_bounds__(BackwardLayout<W, Source, Tile>::kThreads,
                                  BackwardLayout<W, Source, Tile>::kCtasPerSm)
    norm_backward_kernel(const __grid_constant__ NormBackwardArgs args,
                         Accumulator<typename Source::Element>* partials) {
  using T = typename Source::Element;
  using A = Accumulator<T>;
  constexpr int N = kVector<T>;
  constexpr int kLanes = Tile::kLanes;
  constexpr int kVectors = Tile::kVectors;
  constexpr int kStreams = Source::kGradStreams;
  using Layout = BackwardLayout<W, Source, Tile>;
  constexpr int kStages = Layout::kStages;
  constexpr bool kKeepWeight = Layout::kWeightInRegisters;
  using WeightPack = Pack<W, N>;

  extern __shared__ uint4 shared[];
  __shared__ PullbackSums<A> parts[2][kMaxRowThreads / kWarpSize];
  const ThreadSlots slots{shared};

  const int warps = row_warps<Tile>((args.cols + N - 1) / N);
  const int row_threads = kLanes * warps;
  const int rows_at_once = blockDim.x / row_threads;
  const int team = threadIdx.x / row_threads;
  const int lane = threadIdx.x % kLanes;
  const int warp = warps == 1 ? 0 : threadIdx.x / kWarpSize % warps;
  const int width = static_cast<int>(args.cols);  // a row that fits into one CTA is short
  const int first_col = (warp * kVectors * kLanes + lane) * N;
  const auto col_of = [&](int i) { return first_col + i * kLanes * N; };
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * rows_at_once;
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.x) * rows_at_once;
  const A inverse_cols = reciprocal(static_cast<A>(args.cols));
  const A* stats = static_cast<const A*>(args.stats);

  const auto copy_row_ahead = [&](std::int64_t row, int stage) {
    if (row < args.rows) {
      const ConstRows* const streams[3] = {&args.x, &args.grad_output, &args.grad_sum};
#pragma unroll
      for (int s = 0; s < kStreams; ++s) {
        const T* source = row_of<T>(*streams[s], row);
#pragma unroll(Access::kWholePacks ? kVectors : 1)
        for (int i = 0; i < kVectors; ++i) {
          if (col_of(i) < width) {
            copy_ahead<Access, N>(slots.at<Pack<T, N>>((stage * kStreams + s) * kVectors + i),
                                  source, col_of(i), width);
          }
        }
      }
    }
    __pipeline_commit();  // an empty group too: the count of groups is the count of rows
  };

#pragma unroll(Access::kWholePacks ? kStages - 1 : 1)
  for (int stage = 0; stage < kStages - 1; ++stage) {
    copy_row_ahead(first_row + team + stage * step, stage);
  }
  WeightPack kept[kKeepWeight ? kVectors : 1];
  const auto* weight = static_cast<const W*>(args.weight);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const WeightPack pack = Access::template load_or<N>(weight, col_of(i), width, 1);
    if constexpr (kKeepWeight) {
      kept[i] = pack;
    } else {
      constexpr int kParts = Layout::kWeightSlotsPerVector;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        *slots.at<uint4>(kStages * kStreams * kVectors + i * kParts + part) =
            reinterpret_cast<const uint4*>(&pack)[part];
      }
    }
  }
  const auto weight_of = [&](int i, A(&values)[N]) {
    if constexpr (kKeepWeight) {
      unpack(kept[i], values);
    } else {
      constexpr int kParts = Layout::kWeightSlotsPerVector;
      WeightPack pack;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        reinterpret_cast<uint4*>(&pack)[part] =
            *slots.at<uint4>(kStages * kStreams * kVectors + i * kParts + part);
      }
      unpack(pack, values);
    }
  };

  A dweight[kVectors][N] = {};
  A dbias[kVectors][N] = {};
  int stage = 0;
  int parity = 0;
  const auto saved_of = [&](std::int64_t row) {
    return row < args.rows ? Norm::saved(stats, row, args.rows) : SavedStats<A>{};
  };
  SavedStats<A> next = saved_of(first_row + team);  // a row ahead, like the row itself
  for (std::int64_t base = first_row; base < args.rows; base += step) {
    const std::int64_t row = base + team;
    const bool live = row < args.rows;
    if constexpr (!Access::kWholePacks) {
      next = saved_of(row);  // not kept over a row: two registers that element-wise copies need
    }
    const Normalizer<A> normalizer = next.normalizer();
    if constexpr (Access::kWholePacks) {
      next = saved_of(row + step);
    }
    copy_row_ahead(row + (kStages - 1) * step, stage == 0 ? kStages - 1 : stage - 1);
    __pipeline_wait_prior(kStages - 1);

    const auto read = [&](int i, A(&xhat)[N], A(&dy)[N], A(&wdy)[N]) {
      unpack(*slots.at<Pack<T, N>>((stage * kStreams + 0) * kVectors + i), xhat);
      unpack(*slots.at<Pack<T, N>>((stage * kStreams + 1) * kVectors + i), dy);
      weight_of(i, wdy);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        xhat[j] = Norm::normalized(xhat[j], normalizer);
        wdy[j] *= dy[j];
      }
    };

    PullbackSums<A> sums{};
    if (live) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (col_of(i) < width) {
          A xhat[N], dy[N], wdy[N];
          read(i, xhat, dy, wdy);
#pragma unroll
          for (int j = 0; j < N; ++j) {  // past the row's end dy is 0, and so is every term
            sums.add(wdy[j], xhat[j]);
            dweight[i][j] = multiply_add(dy[j], xhat[j], dweight[i][j]);
            dbias[i][j] += dy[j];
          }
        }
      }
    }
    sums.wdy_xhat = lane_sum<kLanes>(sums.wdy_xhat);
    if constexpr (Norm::kCentered) {
      sums.wdy = lane_sum<kLanes>(sums.wdy);
    }
    if (warps > 1) {
      // Two buffers in turn: one barrier a row is enough.
      PullbackSums<A>* const row_parts = parts[parity] + team * warps;
      if (lane == 0) {
        row_parts[warp] = sums;
      }
      row_barrier(team, row_threads);
      sums = {};
      for (int w = 0; w < warps; ++w) {
        sums.wdy_xhat += row_parts[w].wdy_xhat;
        sums.wdy += row_parts[w].wdy;
      }
      parity ^= 1;
    }
    if (live && args.grad_input != nullptr) {
      const Pullback<Norm, A> pullback(sums, normalizer, inverse_cols);
      T* dx = static_cast<T*>(args.grad_input) + row * args.cols;
      // Element-wise stores need registers of their own; nothing here is indexed by i then.
#pragma unroll(Access::kWholePacks || kKeepWeight ? kVectors : 1)
      for (int i = 0; i < kVectors; ++i) {
        if (col_of(i) < width) {
          A xhat[N], dy[N], wdy[N];
          read(i, xhat, dy, wdy);
#pragma unroll
          for (int j = 0; j < N; ++j) {
            xhat[j] = pullback(wdy[j], xhat[j]);
          }
          if constexpr (kStreams == 3) {
            unpack(*slots.at<Pack<T, N>>((stage * kStreams + 2) * kVectors + i), dy);
#pragma unroll
            for (int j = 0; j < N; ++j) {
              xhat[j] += dy[j];
            }
          }
          Access::store(dx, col_of(i), width, pack_from<T, N>(xhat));
        }
      }
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  if (partials == nullptr) {
    return;
  }
  __pipeline_wait_prior(0);  // shared memory is free for other use after the next barrier

  // The rows side by side in this CTA: first those that share a warp,
  A* const sums_of[2] = {&dweight[0][0], &dbias[0][0]};
  constexpr int kOwned = kVectors * N;  // columns of this thread
#pragma unroll
  for (int offset = kWarpSize / 2; offset >= kLanes; offset /= 2) {
#pragma unroll
    for (int grad = 0; grad < Norm::kGrads; ++grad) {
#pragma unroll
      for (int k = 0; k < kOwned; ++k) {
        sums_of[grad][k] += __shfl_xor_sync(kAllLanes, sums_of[grad][k], offset);
      }
    }
  }
  // then the upper half of the groups onto the lower half, until one is left. A thread's sums lie
  // in its own slots, `group_threads` apart.
  const int group_threads = kLanes < 32 ? kWarpSize : row_threads;
  const int group = threadIdx.x / group_threads;
  const int place = threadIdx.x % group_threads;
  A* const exchange = reinterpret_cast<A*>(shared);
  for (int groups = blockDim.x / group_threads; groups > 1;) {
    const int kept_groups = (groups + 1) / 2;
    __syncthreads();
    A* const mine =
        exchange + (group % kept_groups) * Norm::kGrads * kOwned * group_threads + place;
    if (group >= kept_groups && group < groups) {
#pragma unroll
      for (int grad = 0; grad < Norm::kGrads; ++grad) {
#pragma unroll
        for (int k = 0; k < kOwned; ++k) {
          mine[(grad * kOwned + k) * group_threads] = sums_of[grad][k];
        }
      }
    }
    __syncthreads();
    if (group < groups - kept_groups) {
#pragma unroll
      for (int grad = 0; grad < Norm::kGrads; ++grad) {
#pragma unroll
        for (int k = 0; k < kOwned; ++k) {
          sums_of[grad][k] += mine[(grad * kOwned + k) * group_threads];
        }
      }
    }
    groups = kept_groups;
  }
  if (group == 0 && place % kWarpSize < kLanes) {
    A* const target = partials + static_cast<std::int64_t>(blockIdx.x) * Norm::kGrads * args.cols;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      Access::store(target, col_of(i), width, as_pack(dweight[i]));
      if constexpr (Norm::kGrads == 2) {
        Access::store(target + args.cols, col_of(i), width, as_pack(dbias[i]));
      }
    }
  }
}

// Column sums of [parts, grads, cols] into the parameters' type. block: (32 columns, kSumRows).
constexpr int kSumRows = 16;
template <typename W, typename A>
__global__ void __launch_bounds__(kWarpSize* kSumRows)
    sum_partials_kernel(const A* partials, int parts, int grads, std::int64_t cols, W* grad_weight,
                        W* grad_bias) {
  W* const target = blockIdx.y == 0 ? grad_weight : grad_bias;
  if (target == nullptr) {
    return;
  }
  __shared__ A sums[kSumRows][kWarpSize];
  const std::int64_t col = static_cast<std::int64_t>(blockIdx.x) * kWarpSize + threadIdx.x;
  A sum = 0;
  if (col < cols) {
#pragma unroll 8
    for (int part = threadIdx.y; part < parts; part += kSumRows) {
      sum += partials[(static_cast<std::int64_t>(part) * grads + blockIdx.y) * cols + col];
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && col < cols) {
    for (int i = 1; i < kSumRows; ++i) {
      sum += sums[i][threadIdx.x];
    }
    target[col] = static_cast<W>(sum);
  }
}

// Rows too long for one CTA's registers, first step: the two sums of each row. One CTA a row.
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
    unpack(Access::template load<N>(x_row, col, args.cols), x);
    unpack(Access::template load<N>(dy_row, col, args.cols), dy);
    unpack(Access::template load_or<N>(weight, col, args.cols, 1), w);
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
// row chunks); partials: [row chunks, Norm::kGrads, cols].
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
  if (col >= args.cols) {
    return;
  }
  const A inverse_cols = reciprocal(static_cast<A>(args.cols));
  const A* stats = static_cast<const A*>(args.stats);
  const W* weight = static_cast<const W*>(args.weight);
  A w[N];
  A dweight[N] = {};
  A dbias[N] = {};
  unpack(Access::template load_or<N>(weight, col, args.cols, 1), w);
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
      Access::store(dx_row, col, args.cols, pack_from<T, N>(dx));
    }
  }
  if (partials != nullptr) {
    A* const target = partials + static_cast<std::int64_t>(blockIdx.y) * Norm::kGrads * args.cols;
    Access::store(target, col, args.cols, as_pack(dweight));
    if constexpr (Norm::kGrads == 2) {
      Access::store(target + args.cols, col, args.cols, as_pack(dbias));
    }
  }
}

}  // namespace fused_op::cuda
