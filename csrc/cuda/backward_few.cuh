// Backward of few rows, in one launch. dx needs sums over rows, the parameters' gradients need sums
// over columns, and neither needs the other. Some CTAs therefore process rows and the others
// columns; x and dy are read twice, from the L2 cache. That costs less than partial sums and a
// second kernel that adds them up. dx has the same bits as from backward_kernel, because the lanes
// and the arithmetic of a row are the same. Compiled by nvcc and by NVRTC; torch-free.
#pragma once

#include "cuda/backward_op.cuh"
#include "cuda/backward_rows.cuh"

namespace fused_op::cuda {

// A lane's packs of one row, in registers. RowBackward reads the row from it.
template <typename Op, typename Tile>
class HeldRow {
  using Source = typename Op::Source;
  using X = typename Op::X;
  using GradOutput = typename Op::GradOutput;
  using GradSum = typename Source::GradSum;
  static constexpr int N = Tile::kPack;
  static constexpr int kVectors = Tile::kVectors;

 public:
  using RowLane = Lane<Tile::kLanes, Tile::kStep, Tile::kSure, false>;
  static constexpr int kGroupBytes = 0;  // of shared memory

  __device__ __forceinline__ HeldRow(const NormBackwardArgs& args, std::int64_t row,
                                     const RowLane& lane) {
    const std::uint32_t of_x = start(args.x, row, lane, x_);
    const std::uint32_t of_dy = start(args.grad_output, row, lane, dy_);
    if constexpr (Source::kReadsSum) {
      if (Source::sum_arrives(args)) {
        const std::uint32_t of_sum = start(args.grad_sum, row, lane, sum_);
        join(args.grad_sum, row, lane, sum_, of_sum);
      }
    }
    join(args.x, row, lane, x_, of_x);
    join(args.grad_output, row, lane, dy_, of_dy);
  }

  // Pack i of x (0), dy (1) or the gradient of the sum (2).
  template <int kStream>
  __device__ __forceinline__ auto load(int i) const {
    if constexpr (kStream == 0) {
      return x_[i];
    } else if constexpr (kStream == 1) {
      return dy_[i];
    } else {
      return sum_[i];
    }
  }

 private:
  template <typename T>
  __device__ __forceinline__ static std::uint32_t start(const ConstRows& rows, std::int64_t row,
                                                        const RowLane& lane,
                                                        Pack<T, N> (&packs)[kVectors]) {
    return Op::Access::start(lane, first_of<T, Source::kAtTwoStrides>(rows, row), packs);
  }
  template <typename T>
  __device__ __forceinline__ static void join(const ConstRows& rows, std::int64_t row,
                                              const RowLane& lane, Pack<T, N> (&packs)[kVectors],
                                              std::uint32_t started) {
    Op::Access::join(lane, first_of<T, Source::kAtTwoStrides>(rows, row), packs, started);
  }

  Pack<X, N> x_[kVectors];
  Pack<GradOutput, N> dy_[kVectors];
  Pack<GradSum, N> sum_[Source::kReadsSum ? kVectors : 1];
};

// Where a thread stands. A row has warps of its own, or shares a warp with other rows.
template <typename Tile>
__device__ __forceinline__ BackwardPlace few_place() {
  const int thread = static_cast<int>(threadIdx.x);
  if constexpr (Tile::kLanes < kWarpSize) {
    return {thread / Tile::kLanes, thread % Tile::kLanes, 0, 1};
  } else {
    return {static_cast<int>(threadIdx.y), thread % kWarpSize, thread / kWarpSize,
            static_cast<int>(blockDim.x) / kWarpSize};
  }
}

// Computes dx of a row. Threads of rows past the last one take part, because the CTA has barriers.
template <typename Op, typename Tile>
__device__ __forceinline__ void few_rows(const NormBackwardArgs& args, const BackwardPlace& place,
                                         std::int64_t row) {
  using Norm = typename Op::Norm;
  using A = typename Op::A;
  using Backward = RowBackward<Op, Tile, HeldRow<Op, Tile>>;
  __shared__ PullbackSums<A> parts[Tile::kThreads / kWarpSize];
  const bool live = row < args.rows;
  row = live ? row : args.rows - 1;
  const int width = static_cast<int>(args.cols);
  const typename Backward::RowLane lane{place.warp * Tile::kWarpCols + place.lane * Tile::kPack,
                                        width, true};
  const SavedStats<A> stats = Norm::saved(static_cast<const A*>(args.stats), row, args.rows);
  Backward backward(args, HeldRow<Op, Tile>(args, row, lane), 0, lane, place.lane, row);
  const Normalizer<A> normalizer = stats.normalizer();
  typename Backward::Sums ignored[Tile::kVectors];
  PullbackSums<A> sums = backward.sums(row, normalizer, ignored);
  sums = sum_over_row<Norm, Tile>(sums, parts + place.team * place.warps, place);
  if (live && Op::Source::wanted(args)) {
    const A inverse_cols = reciprocal(static_cast<A>(width));
    backward.leave(row, normalizer, Pullback<Norm, A>(sums, normalizer, inverse_cols));
  }
}

// Computes the parameters' gradients at the columns of a slab. Groups of kSlabLanes threads take
// rows in turn; each thread has kOwn columns of its row. Then the groups' sums are added in order.
template <typename Op, typename Tile>
class Slab {
  static_assert(!Op::Epilogue::kGrouped, "all rows have the same parameters");
  using Norm = typename Op::Norm;
  using A = typename Op::A;
  using X = typename Op::X;
  using GradOutput = typename Op::GradOutput;
  using W = typename Op::Epilogue::Parameter;
  static constexpr int N = Tile::kPack;
  static constexpr int kWidest =
      static_cast<int>(sizeof(X) > sizeof(GradOutput) ? sizeof(X) : sizeof(GradOutput));
  static constexpr int kOwn = slab_columns(!Op::Access::kWhole, N, kWidest);
  static constexpr int kVectors = kOwn / N;
  static constexpr int kStep = kSlabLanes * N;
  using SlabLane = Lane<kSlabLanes, kStep, 0, false>;
  using Parameters = typename Op::Epilogue::template Parameters<N>;

 public:
  static constexpr int kCols = kSlabLanes * kOwn;

  __device__ __forceinline__ Slab(const NormBackwardArgs& args, int first_col)
      : args_(args),
        first_col_(first_col),
        thread_(static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x)),
        threads_(static_cast<int>(blockDim.x * blockDim.y)),
        lane_{first_col + thread_ % kSlabLanes * N, static_cast<int>(args.cols), true} {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if constexpr (Op::Epilogue::kFromOutput) {
        parameters_[i] = Op::Epilogue::template load<Norm, typename Op::Access, N>(
            args, 0, lane_.col(i), lane_.template valid<N>(i));
      } else {
        clear(parameters_[i].weight);  // is never read
      }
      totals_[i].clear();
    }
  }

  __device__ __forceinline__ int groups() const { return threads_ / kSlabLanes; }

  // The loads of kAtOnce rows are started before the first of them is waited for.
  template <int kAtOnce>
  __device__ __forceinline__ void take_rows() {
    const int step = groups();
    for (std::int64_t first = 0; first < args_.rows; first += kAtOnce * step) {
      Pack<X, N> x[kAtOnce][kVectors];
      Pack<GradOutput, N> dy[kAtOnce][kVectors];
      std::uint32_t of_x[kAtOnce], of_dy[kAtOnce];
      SavedStats<A> stats[kAtOnce];
      const auto row_of = [&](int k) { return first + k * step + thread_ / kSlabLanes; };
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const std::int64_t row = min(row_of(k), args_.rows - 1);
        of_x[k] = Op::Access::start(lane_, x_of(row), x[k]);
        of_dy[k] = Op::Access::start(lane_, dy_of(row), dy[k]);
        stats[k] = Norm::saved(static_cast<const A*>(args_.stats), row, args_.rows);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const std::int64_t row = min(row_of(k), args_.rows - 1);
        Op::Access::join(lane_, x_of(row), x[k], of_x[k]);
        Op::Access::join(lane_, dy_of(row), dy[k], of_dy[k]);
        if (row_of(k) < args_.rows) {
          take_row(row, x[k], dy[k], stats[k].normalizer());
        }
      }
    }
  }

  // Adds up the sums of all threads and stores the gradients. All threads of the CTA call it.
  __device__ __forceinline__ void leave() {
    __shared__ A sums[Tile::kThreads / kWarpSize][Norm::kGrads][kCols];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const int col = lane_.col(i) + j - first_col_;
        put(totals_[i].weight[j], sums[thread_ / kWarpSize][0][col]);
        if constexpr (Norm::kGrads == 2) {
          put(totals_[i].bias[j], sums[thread_ / kWarpSize][1][col]);
        }
      }
    }
    __syncthreads();
    for (int at = thread_; at < Norm::kGrads * kCols; at += threads_) {
      const int grad = at / kCols;
      const int col = first_col_ + at % kCols;
      void* const target = grad == 0 ? args_.grad_weight : args_.grad_bias;
      if (target != nullptr && col < lane_.width) {
        A total = 0;
        for (int warp = 0; warp < threads_ / kWarpSize; ++warp) {
          total += sums[warp][grad][at % kCols];
        }
        store_gradient<W>(target, col, total, args_.add_grads);
      }
    }
  }

 private:
  __device__ __forceinline__ const X* x_of(std::int64_t row) const {
    return first_of<X, Op::Source::kAtTwoStrides>(args_.x, row);
  }
  __device__ __forceinline__ const GradOutput* dy_of(std::int64_t row) const {
    return first_of<GradOutput, Op::Source::kAtTwoStrides>(args_.grad_output, row);
  }

  __device__ __forceinline__ void take_row(std::int64_t row, const Pack<X, N> (&x)[kVectors],
                                           const Pack<GradOutput, N> (&dy)[kVectors],
                                           const Normalizer<A>& normalizer) {
    const typename Op::Epilogue epilogue(args_, row);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      A xhat[N], grad[N];
      NoPack nothing;
      expand<Op>(epilogue, parameters_[i], lane_.col(i), x[i], dy[i], nothing, normalizer, xhat,
                 grad, totals_[i]);
    }
  }

  // Adds up `total` over the groups of a warp.
  __device__ __forceinline__ void put(A total, A& sum) const {
#pragma unroll
    for (int offset = kSlabLanes; offset < kWarpSize; offset *= 2) {
      total += __shfl_xor_sync(kAllLanes, total, offset);
    }
    if (thread_ % kWarpSize < kSlabLanes) {
      sum = total;
    }
  }

  const NormBackwardArgs& args_;
  int first_col_;
  int thread_;
  int threads_;
  SlabLane lane_;
  Parameters parameters_[kVectors];
  ParameterSums<N, A> totals_[kVectors];
};

// grid: row_ctas CTAs that take rows, and then one CTA for each slab of columns. block: (threads of
// a row, rows side by side); if rows share a warp, blockDim.y is 1.
template <typename Op, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    backward_few_kernel(const __grid_constant__ NormBackwardArgs args, int row_ctas) {
  const int cta = static_cast<int>(blockIdx.x);
  const BackwardPlace place = few_place<Tile>();
  const auto rows_of_cta =
      static_cast<int>(Tile::kLanes < kWarpSize ? blockDim.x / Tile::kLanes : blockDim.y);
  const std::int64_t row = static_cast<std::int64_t>(cta) * rows_of_cta + place.team;
  if constexpr (!Op::Source::kAtTwoStrides) {
    if (cta < row_ctas) {
      prefetch_first_row<Op, Tile>(args, row, static_cast<int>(args.cols), place);
    }
  }
  await_kernels_before();
  if (cta < row_ctas) {
    few_rows<Op, Tile>(args, place, row);
  } else {
    Slab<Op, Tile> slab(args, (cta - row_ctas) * Slab<Op, Tile>::kCols);
    if (args.rows <= slab.groups()) {
      slab.template take_rows<1>();
    } else if (args.rows <= 2 * slab.groups()) {
      slab.template take_rows<2>();
    } else {
      slab.template take_rows<4>();
    }
    slab.leave();
  }
}

}  // namespace fused_op::cuda
