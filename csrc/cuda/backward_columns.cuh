// Backward of rows that are too long for a CTA, in two kernels that each read x and dy. The first
// computes the two sums of each row, one CTA for each piece of it. The second computes dx, and the
// parameters' gradients by columns. Compiled by nvcc and by NVRTC; torch-free.
#pragma once

#include <type_traits>

#include "cuda/access.cuh"
#include "cuda/backward_long.h"
#include "cuda/backward_op.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/words.cuh"

namespace fused_op::cuda {

// Vectors whose loads make the L2 cache fetch whole lines: 4.6 us instead of 4.9 at 1x262144 (bf16,
// H200).
struct Lines : Vectors {
  template <typename Lane, typename T, int N, int kVectors>
  __device__ __forceinline__ static void load(const Lane& lane, const T* row,
                                              Pack<T, N> (&packs)[kVectors]) {
    if constexpr (sizeof(T) * N != kVectorBytes) {
      Vectors::load(lane, row, packs);
    } else {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        clear(packs[i]);
        load_line_if(lane.template valid<N>(i) > 0, row + lane.col(i), packs[i].words);
      }
    }
  }
};
template <typename Op>
using LongAccess =
    std::conditional_t<std::is_same_v<typename Op::Access, Vectors>, Lines, typename Op::Access>;

// A lane's packs of a unit: like Lane of access.cuh, but with columns of 64 bits.
template <typename Tile>
struct UnitLane {
  static constexpr int kLanes = kWarpSize;
  static constexpr int kStep = kWarpSize * Tile::kPack;
  static constexpr int kSure = 0;
  static constexpr bool kKeep = false;
  static constexpr bool live = true;

  std::int64_t first;
  std::int64_t width;

  __device__ __forceinline__ std::int64_t col(int i) const { return first + i * kStep; }
  template <int N>
  __device__ __forceinline__ int valid(int i) const {
    const std::int64_t left = width - col(i);
    return static_cast<int>(left > N ? N : left < -1 ? -1 : left);
  }
};
// The lane of a thread. Units are numbered along the row; thread 0 has number `first_unit`.
template <typename Tile>
__device__ __forceinline__ UnitLane<Tile> unit_lane(std::int64_t first_unit, int thread,
                                                    std::int64_t width) {
  const int lane = thread % kWarpSize;
  return {(first_unit + thread - lane) * Tile::kUnit + lane * Tile::kPack, width};
}

template <typename Op, int N>
using ParametersOf = typename Op::Epilogue::template Parameters<N>;

// Sums over the CTA: over the lanes of each warp, and then over the warps in order. The result is
// valid in all threads. parts: one element for each warp, in shared memory.
template <typename Norm, typename A>
__device__ __forceinline__ PullbackSums<A> sum_in_turn(PullbackSums<A> sums,
                                                       PullbackSums<A>* parts) {
  sums.wdy_xhat = lane_sum<kWarpSize>(sums.wdy_xhat);
  if constexpr (Norm::kCentered) {
    sums.wdy = lane_sum<kWarpSize>(sums.wdy);
  }
  if (threadIdx.x % kWarpSize == 0) {
    parts[threadIdx.x / kWarpSize] = sums;
  }
  __syncthreads();
  sums = {A(0), A(0)};
#pragma unroll 4
  for (int warp = 0; warp < kPieceThreads / kWarpSize; ++warp) {
    sums.wdy_xhat += parts[warp].wdy_xhat;
    sums.wdy += parts[warp].wdy;
  }
  return sums;
}

// A thread's share of a piece of a row. All of its loads are in flight at once.
template <typename Op, typename Tile>
class PieceRow {
  using Norm = typename Op::Norm;
  using A = typename Op::A;
  using X = typename Op::X;
  using GradOutput = typename Op::GradOutput;
  using Access = LongAccess<Op>;
  static constexpr int N = Tile::kPack;
  static constexpr int kVectors = Tile::kVectors;

 public:
  __device__ __forceinline__ PieceRow(const typename Op::Args& args, std::int64_t row,
                                      unsigned piece, unsigned pieces)
      : args_(args), row_(row), piece_(piece), pieces_(pieces) {}

  // Prefetches the piece. The kernels before this one may not have ended yet.
  __device__ __forceinline__ void ask() const {
#pragma unroll
    for (int i = 0; i < kPieceUnits; ++i) {
      Access::template prefetch_row<kVectors>(lane(i), first_of<X, false>(args_.x, row_));
      Access::template prefetch_row<kVectors>(lane(i),
                                              first_of<GradOutput, false>(args_.grad_output, row_));
      if (row_ == 0 && args_.weight != nullptr) {  // once for all rows
        using W = typename Op::Epilogue::Parameter;
        Access::template prefetch_row<kVectors>(lane(i), static_cast<const W*>(args_.weight));
      }
    }
  }

  __device__ __forceinline__ void load() {
#pragma unroll
    for (int i = 0; i < kPieceUnits; ++i) {
      const UnitLane<Tile> here = lane(i);
      Access::load(here, first_of<X, false>(args_.x, row_), x_[i]);
      Access::load(here, first_of<GradOutput, false>(args_.grad_output, row_), dy_[i]);
      if constexpr (Op::kReadsBeside) {
        Access::load(here, first_of<StreamElement<Op, 2>, false>(Op::third(args_), row_),
                     beside_[i]);
      }
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        parameters_[i][k] = Op::Epilogue::template load<Norm, Access, N>(args_, row_, here.col(k),
                                                                         here.template valid<N>(k));
      }
    }
  }

  __device__ __forceinline__ PullbackSums<A> sums() const {
    const Normalizer<A> normalizer =
        Norm::saved(static_cast<const A*>(args_.stats), row_, args_.rows).normalizer();
    const typename Op::Epilogue epilogue(args_, row_);
    PullbackSums<A> sums{A(0), A(0)};
#pragma unroll
    for (int i = 0; i < kPieceUnits; ++i) {
      const UnitLane<Tile> here = lane(i);
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const int valid = here.template valid<N>(k);
        if (valid > 0) {
          A xhat[N], grad[N];
          ParameterSums<N, A> ignored;
          typename Op::template BesidePack<N> beside = beside_[i][k];
          expand<Op>(epilogue, parameters_[i][k], here.col(k), x_[i][k], dy_[i][k], beside,
                     normalizer, xhat, grad, ignored);
#pragma unroll
          for (int j = 0; j < N; ++j) {
            if (Access::kWhole || valid > j) {
              sums.add(grad[j], xhat[j]);
            }
          }
        }
      }
    }
    return sums;
  }

 private:
  __device__ __forceinline__ UnitLane<Tile> lane(int i) const {
    const std::int64_t first = (std::int64_t{i} * pieces_ + piece_) * kPieceThreads;
    return unit_lane<Tile>(first, static_cast<int>(threadIdx.x), args_.cols);
  }

  const typename Op::Args& args_;
  std::int64_t row_;
  unsigned piece_;
  unsigned pieces_;
  Pack<X, N> x_[kPieceUnits][kVectors];
  Pack<GradOutput, N> dy_[kPieceUnits][kVectors];
  typename Op::template BesidePack<N> beside_[kPieceUnits][kVectors];
  ParametersOf<Op, N> parameters_[kPieceUnits][kVectors];
};

// row_sums: [rows, pieces]. The number of pieces depends on the row's length alone;
// backward_columns_kernel adds them up in order. grid: rows · pieces.
template <typename Op, typename Tile>
__global__ void __launch_bounds__(kPieceThreads, 1)
    backward_row_sums_kernel(const __grid_constant__ typename Op::Args args,
                             PullbackSums<typename Op::A>* row_sums) {
  __shared__ PullbackSums<typename Op::A> parts[kPieceThreads / kWarpSize];
  const auto pieces = static_cast<unsigned>(row_pieces(args.cols, Tile::kUnit));
  PieceRow<Op, Tile> piece(args, blockIdx.x / pieces, blockIdx.x % pieces, pieces);
  if (blockIdx.x < kPrefetchingCtas) {
    piece.ask();
  }
  await_kernels_before();
  piece.load();
  const auto sums = sum_in_turn<typename Op::Norm>(piece.sums(), parts);
  if (threadIdx.x == 0) {
    row_sums[blockIdx.x] = sums;
  }
}

// A thread's unit of columns, which it processes in one row after another.
template <typename Op, typename Tile>
class UnitColumns {
  static_assert(!Op::Epilogue::kGrouped, "all rows have the same parameters");
  using Norm = typename Op::Norm;
  using A = typename Op::A;
  using X = typename Op::X;
  using GradOutput = typename Op::GradOutput;
  using W = typename Op::Epilogue::Parameter;
  using Access = LongAccess<Op>;
  static constexpr int N = Tile::kPack;
  static constexpr int kVectors = Tile::kVectors;
  static constexpr std::int64_t kNoColumns = -2;  // at 0, Words could read before column 0

 public:
  static constexpr int kAtOnce = 4;  // rows in flight: 7.8 us; 2: 8.6 us (8x65536, bf16, H200)

  __device__ __forceinline__ UnitColumns(const typename Op::Args& args, std::int64_t first_unit)
      : args_(args), lane_(unit_lane<Tile>(first_unit, static_cast<int>(threadIdx.x), args.cols)) {}

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      parameters_[i] = Op::Epilogue::template load<Norm, Access, N>(args_, 0, lane_.col(i),
                                                                    lane_.template valid<N>(i));
      totals_[i].clear();
    }
  }

  // Loads kAtOnce rows, or as many of them as come before `last`.
  __device__ __forceinline__ void load(std::int64_t row, std::int64_t last) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const UnitLane<Tile> lane{lane_.first, row + k < last ? lane_.width : kNoColumns};
      Access::load(lane, first_of<X, false>(args_.x, row + k), x_[k]);
      Access::load(lane, first_of<GradOutput, false>(args_.grad_output, row + k), dy_[k]);
    }
  }

  // Processes the k-th of the rows in flight.
  __device__ __forceinline__ void take(std::int64_t row, int k, const Normalizer<A>& normalizer,
                                       const Pullback<Norm, A>& pullback) {
    const typename Op::Epilogue epilogue(args_, row);
    const typename Op::Source source(args_, row);
    using GradSum = typename Op::Source::GradSum;
    Pack<GradSum, N> arriving[kVectors];
    const bool arrives = Op::Source::kReadsSum && Op::Source::sum_arrives(args_);
    if (arrives) {
      Access::load(lane_, first_of<GradSum, false>(args_.grad_sum, row), arriving);
    }
    typename Op::template BesidePack<N> beside[kVectors];
    if constexpr (Op::kReadsBeside) {
      Access::load(lane_, first_of<StreamElement<Op, 2>, false>(Op::third(args_), row), beside);
    }
    typename Op::Source::template Gradients<N, kVectors> gradients;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      A xhat[N], grad[N];
      expand<Op>(epilogue, parameters_[i], lane_.col(i), x_[k][i], dy_[k][i], beside[i], normalizer,
                 xhat, grad, totals_[i]);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        xhat[j] = pullback(grad[j], xhat[j]);
      }
      if (arrives) {
        to_values(arriving[i], grad);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          xhat[j] += grad[j];
        }
      }
      if constexpr (Op::Source::kReadsBeside) {
        source.leave(x_[k][i], beside[i], xhat, i, gradients);
      } else {
        source.leave(lane_.col(i), xhat, i, gradients);
      }
    }
    if constexpr (Op::Epilogue::kReadsBeside) {
      epilogue.template store_beside<Access>(lane_, 0, beside);
    }
    if (Op::Source::wanted(args_)) {
      source.template store<Access>(lane_, 0, gradients);
    }
  }

  // partials: [gridDim.y, Norm::kGrads, partials_stride(cols)], or null.
  __device__ __forceinline__ void leave(A* partials) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      leave_pack(partials, 0, i, args_.grad_weight, totals_[i].weight);
      if constexpr (Norm::kGrads == 2) {
        leave_pack(partials, 1, i, args_.grad_bias, totals_[i].bias);
      }
    }
  }

 private:
  __device__ __forceinline__ void leave_pack(A* partials, int grad, int i, void* gradient,
                                             const A (&sums)[N]) const {
    const std::int64_t col = lane_.col(i);
    if (partials != nullptr) {
      const std::int64_t stride = partials_stride(lane_.width);
      const std::int64_t part = std::int64_t{blockIdx.y} * Norm::kGrads + grad;
      if (col < stride) {
        std::uint32_t words[N * sizeof(A) / 4];
        memcpy(words, sums, sizeof(words));
        store_bytes<sizeof(words)>(partials + part * stride + col, words);
      }
    } else if (gradient != nullptr) {
      store_parameters(static_cast<W*>(gradient) + col, lane_.template valid<N>(i),
                       rounded<W>(sums));
    }
  }
  __device__ __forceinline__ static void store_parameters(W* to, int valid,
                                                          const Pack<W, N>& pack) {
    if (valid == N) {
      store_bytes<sizeof(W) * N>(to, pack.words);
      return;
    }
    W elements[N];
    memcpy(elements, pack.words, sizeof(elements));
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (j < valid) {
        to[j] = elements[j];
      }
    }
  }

  const typename Op::Args& args_;
  UnitLane<Tile> lane_;
  ParametersOf<Op, N> parameters_[kVectors];
  ParameterSums<N, A> totals_[kVectors];
  Pack<X, N> x_[kAtOnce][kVectors];
  Pack<GradOutput, N> dy_[kAtOnce][kVectors];
};

// What all columns of a row share. A CTA holds it for as many rows as it has threads.
template <typename Norm, typename A>
struct RowFacts {
  Normalizer<A> normalizer;
  PullbackSums<A> sums;

  __device__ __forceinline__ void read(const NormBackwardArgs& args,
                                       const PullbackSums<A>* row_sums, std::int64_t row,
                                       unsigned pieces) {
    const SavedStats<A> saved = Norm::saved(static_cast<const A*>(args.stats), row, args.rows);
    PullbackSums<A> total{A(0), A(0)};
#pragma unroll 16
    for (unsigned piece = 0; piece < pieces; ++piece) {
      const PullbackSums<A> part = row_sums[row * pieces + piece];
      total.wdy_xhat += part.wdy_xhat;
      total.wdy += part.wdy;
    }
    sums = total;
    normalizer = saved.normalizer();
  }
};

// A CTA walks over the rows of a chunk, at the columns of a slab. grid: (slabs of columns, chunks
// of rows). partials: null if there is only one chunk, whose sums are the gradients.
template <typename Op, typename Tile>
__global__ void __launch_bounds__(kColumnThreads)
    backward_columns_kernel(const __grid_constant__ typename Op::Args args,
                            const PullbackSums<typename Op::A>* row_sums,
                            typename Op::A* partials) {
  using Norm = typename Op::Norm;
  using A = typename Op::A;
  using Columns = UnitColumns<Op, Tile>;
  __shared__ RowFacts<Norm, A> facts[kColumnThreads];
  const auto pieces = static_cast<unsigned>(row_pieces(args.cols, Tile::kUnit));
  const A inverse_cols = reciprocal(static_cast<A>(args.cols));
  std::int64_t first_row = 0;
  std::int64_t last_row = args.rows;
  if (gridDim.y > 1) {  // spares few rows the two divisions
    first_row = args.rows * blockIdx.y / gridDim.y;
    last_row = args.rows * (blockIdx.y + 1) / gridDim.y;
  }
  Columns columns(args, std::int64_t{blockIdx.x} * kColumnThreads);
  await_kernels_before();
  columns.load(first_row, last_row);
  columns.begin();
#pragma unroll 1
  for (std::int64_t first = first_row; first < last_row; first += kColumnThreads) {
    const auto rows = static_cast<int>(
        last_row - first < kColumnThreads ? last_row - first : std::int64_t{kColumnThreads});
    __syncthreads();  // all threads have read `facts` before it is written again
    if (static_cast<int>(threadIdx.x) < rows) {
      facts[threadIdx.x].read(args, row_sums, first + threadIdx.x, pieces);
    }
    __syncthreads();
#pragma unroll 1
    for (int r = 0; r < rows; r += Columns::kAtOnce) {
#pragma unroll
      for (int k = 0; k < Columns::kAtOnce; ++k) {
        if (r + k < rows) {
          const Normalizer<A> normalizer = facts[r + k].normalizer;
          columns.take(first + r + k, k, normalizer,
                       Pullback<Norm, A>(facts[r + k].sums, normalizer, inverse_cols));
        }
      }
      columns.load(first + r + Columns::kAtOnce, last_row);
    }
  }
  columns.leave(partials);
}

}  // namespace fused_op::cuda
