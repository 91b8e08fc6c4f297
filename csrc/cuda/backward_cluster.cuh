// The backward of rows too long for one CTA, in one pass (sm_90): a cluster takes a row, each CTA
// the columns of one of its pieces, and x and dy are read once, through shared memory. While the
// sums of a row are on their way through the cluster, the CTAs take those of the next one. The sums
// are those of backward_long.cuh, in the same order. H200, bf16, share of the limit there and here,
// LayerNorm and RmsNorm: 0.53 0.54, 0.88 0.89 at 4096x32768; 0.53 0.54, 0.82 0.89 at 2048x65536;
// 0.53 0.53, 0.79 0.88 at 1024x131072; 0.49 0.51, 0.71 0.79 at 512x262144, where clusters of 4, 8
// and 16 CTAs leave 12, 12 and 20 of the 132 multiprocessors without one. Included by launch_*.cu
// only; torch-free.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "core/norm_args.h"
#include "core/row_source.h"
#include "cuda/backward.cuh"
#include "cuda/backward_long.cuh"
#include "cuda/cluster_exchange.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/row_access.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/row_tile.h"

namespace fused_op::cuda {

// Shared memory: the rows in flight, the weight, then what the CTAs tell each other.
template <typename W, typename T>
struct ClusterRows {
  static constexpr int N = kVector<T>;
  static constexpr int kVectors = kPieceVectors / kMaxRowThreads;  // of a thread
  static constexpr int kStreamBytes = kPieceVectors * kVectorBytes;
  static constexpr int kWeightBytes = kPieceVectors * N * static_cast<int>(sizeof(W));
  static constexpr int kStages = kWeightBytes > kStreamBytes ? 2 : 3;  // what there is room for
  static constexpr int kSharedBytes = kStages * 2 * kStreamBytes + kWeightBytes;
};

// grid: clusters of as many CTAs as a row has pieces. partials: [clusters, Norm::kGrads,
// partial_stride(cols)], or null where one cluster takes all rows.
template <typename W, typename Norm, typename T>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    norm_backward_cluster_kernel(const __grid_constant__ NormBackwardArgs args,
                                 Accumulator<T>* partials) {
#if __CUDA_ARCH__ >= 900  // never launched before
  using A = Accumulator<T>;
  using Layout = ClusterRows<W, T>;
  constexpr int N = Layout::N;
  constexpr int kVectors = Layout::kVectors;
  constexpr int kStages = Layout::kStages;
  constexpr int kWeightWords = N * sizeof(W) / 4;

  extern __shared__ uint4 shared[];
  __shared__ PullbackSums<A> warp_sums[2][kMaxRowThreads / kWarpSize];
  constexpr int kSlots = 4;
  __shared__ PullbackSums<A> piece_sums[kSlots * kMaxCluster];
  __shared__ std::uint64_t arrivals[kSlots];

  const int thread = threadIdx.x;
  const int warp = thread / kWarpSize;
  const int ctas = static_cast<int>(cluster_size());
  const int rank = static_cast<int>(cluster_rank());
  const std::int64_t clusters = gridDim.x / ctas;
  const std::int64_t first_row = cluster_id();
  const int width = static_cast<int>(args.cols);
  const A inverse_cols = reciprocal(static_cast<A>(width));
  const auto col_of = [&](int i) { return ((i * ctas + rank) * kMaxRowThreads + thread) * N; };
  const int vector_step = ctas * kMaxRowThreads * kVectorBytes;  // from a vector to the next

  const ClusterExchange<PullbackSums<A>, kSlots> exchange{
      piece_sums, arrivals, ctas, ctas, cluster_rows(args.rows, first_row, clusters)};
  exchange.begin();
  await_kernels_before();

  const std::uint32_t own = shared_address(shared) + thread * kVectorBytes;
  const auto block = [&](int stage, int stream, int i) {
    return own + (stage * 2 + stream) * Layout::kStreamBytes + i * kMaxRowThreads * kVectorBytes;
  };
  const std::uint32_t weights =
      own + kStages * 2 * Layout::kStreamBytes;  // sizeof(W) * N / 16 blocks a vector
  const auto weight_block = [&](int i, int part) {
    return weights + (i * (kWeightWords / 4) + part) * kMaxRowThreads * kVectorBytes;
  };
  const auto copy = [&](std::int64_t row, int stage) {
    if (row < args.rows) {
      const T* const rows[2] = {row_of<T>(args.x, row), row_of<T>(args.grad_output, row)};
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        std::uintptr_t from = global_address(rows[s] + col_of(0));
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          if (col_of(i) < width) {
            copy_async(block(stage, s, i), from);
          }
          from += vector_step;
        }
      }
    }
    __pipeline_commit();  // an empty group too: the count of groups is the count of rows
  };
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    copy(first_row + stage * clusters, stage);
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const auto pack = load_parameters<N>(static_cast<const W*>(args.weight), col_of(i), width, 1);
#pragma unroll
    for (int part = 0; part < kWeightWords / 4; ++part) {
      store_shared(weight_block(i, part), pack.words + 4 * part);
    }
  }
  const A* const stats = static_cast<const A*>(args.stats);
  const auto saved_of = [&](std::int64_t row) {
    return row < args.rows ? Norm::saved(stats, row, args.rows) : SavedStats<A>{};
  };

  A dweight[kVectors][N] = {};
  A dbias[kVectors][N] = {};
  const auto expand = [&](int stage, int i, const Normalizer<A>& normalizer, A(&xhat)[N], A(&dy)[N],
                          A(&wdy)[N]) {
    Pack<T, N> x_pack, dy_pack;
    Pack<W, N> weight;
    load_shared(block(stage, 0, i), x_pack.words);
    load_shared(block(stage, 1, i), dy_pack.words);
#pragma unroll
    for (int part = 0; part < kWeightWords / 4; ++part) {
      load_shared(weight_block(i, part), weight.words + 4 * part);
    }
    unpack(x_pack, xhat);
    unpack(dy_pack, dy);
    unpack(weight, wdy);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      xhat[j] = Norm::normalized(xhat[j], normalizer);
      wdy[j] *= dy[j];
    }
  };
  // Adds a row to the gradients of the parameters, and sends this piece's sums.
  const auto take = [&](unsigned number, int stage, const Normalizer<A>& normalizer) {
    PullbackSums<A> sums{};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (col_of(i) < width) {
        A xhat[N], dy[N], wdy[N];
        expand(stage, i, normalizer, xhat, dy, wdy);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          sums.add(wdy[j], xhat[j]);
          dweight[i][j] = multiply_add(dy[j], xhat[j], dweight[i][j]);
          dbias[i][j] += dy[j];
        }
      }
    }
    sums = row_sum<Norm, kWarpSize, kMaxRowThreads / kWarpSize, InTurn>(
        sums, warp_sums[number % 2], 0, warp, kMaxRowThreads / kWarpSize);
    if (warp == 0) {
      exchange.send(number, rank, sums);
    }
  };

  exchange.ready();
  SavedStats<A> next = saved_of(first_row + clusters);
  Normalizer<A> here = saved_of(first_row).normalizer();
  __pipeline_wait_prior(kStages - 1);
  take(0, 0, here);
  int stage = 0;
  unsigned number = 0;  // of the cluster's rows
  for (std::int64_t row = first_row; row < args.rows; row += clusters, ++number) {
    const Normalizer<A> after = next.normalizer();
    const int next_stage = stage + 1 == kStages ? 0 : stage + 1;
    next = saved_of(row + 2 * clusters);
    __pipeline_wait_prior(kStages - 2);
    if (row + clusters < args.rows) {
      take(number + 1, next_stage, after);
    }
    const PullbackSums<A>* const pieces = exchange.await(number);
    PullbackSums<A> sums{};
    for (int piece = 0; piece < ctas; ++piece) {
      sums.wdy_xhat += pieces[piece].wdy_xhat;
      sums.wdy += pieces[piece].wdy;
    }
    if (args.grad_input.data != nullptr) {
      const Pullback<Norm, A> pullback(sums, here, inverse_cols);
      std::uintptr_t dx =
          global_address(static_cast<T*>(args.grad_input.data) + row * args.cols + col_of(0));
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (col_of(i) < width) {
          A xhat[N], dy[N], wdy[N];
          expand(stage, i, here, xhat, dy, wdy);
#pragma unroll
          for (int j = 0; j < N; ++j) {
            xhat[j] = pullback(wdy[j], xhat[j]);
          }
          store_if(true, reinterpret_cast<void*>(dx), pack_from<T, N>(xhat).words);
        }
        dx += vector_step;
      }
    }
    copy(row + kStages * clusters, stage);
    stage = next_stage;
    here = after;
  }

  const std::int64_t stride = partial_stride<Plain<T>>(args.cols);
  const std::int64_t part = first_row * Norm::kGrads;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
#pragma unroll
    for (int grad = 0; grad < Norm::kGrads; ++grad) {
      A(&sums)[N] = grad == 0 ? dweight[i] : dbias[i];
      void* const gradient = grad == 0 ? args.grad_weight : args.grad_bias;
      if (partials != nullptr) {
        VectorAccess::store(partials + (part + grad) * stride, col_of(i), width, as_pack(sums));
      } else if (gradient != nullptr && col_of(i) < width) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
          store_gradient<W>(gradient, args.param_dtype, col_of(i) + j, sums[j]);
        }
      }
    }
  }
#endif
}

}  // namespace fused_op::cuda
