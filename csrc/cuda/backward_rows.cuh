// The backward kernel of rows that fit into one CTA. It reads x and dy once, ahead of time
// (staged_rows.cuh), and takes two passes over a row in shared memory or registers: the sums that
// its gradient needs, and the gradient. Those of the parameters stay in registers over all rows of
// a CTA and leave as one row of partial sums, which add_partials_kernel adds in a fixed order. No
// atomics. Which threads hold a row is the tile's affair, integers that the plan chose. Compiled by
// nvcc and by NVRTC; torch-free.
#pragma once

#include <type_traits>

#include "core/norm_args.h"
#include "core/norm_math.h"
#include "cuda/access.cuh"
#include "cuda/backward_op.cuh"
#include "cuda/backward_tile.h"
#include "cuda/dependent_launch.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/staged_rows.cuh"

namespace fused_op::cuda {

// Where a thread stands. A team is the threads of a row, one of blockDim.y in the CTA.
struct BackwardPlace {
  int team;
  int lane;   // of kLanes
  int warp;   // of the row
  int warps;  // of the row
};

template <typename Tile>
__device__ __forceinline__ BackwardPlace backward_place() {
  const int thread = static_cast<int>(threadIdx.x);
  const int team = static_cast<int>(threadIdx.y);
  if constexpr (Tile::kOneWarp) {
    return {team, thread, 0, 1};
  } else {
    const int warps = Tile::kWidth > 0 ? Tile::kWarps : static_cast<int>(blockDim.x) / kWarpSize;
    return {team, thread % kWarpSize, thread / kWarpSize, warps};
  }
}

// Packs that are computed together: Words stores several in one branch.
template <typename Op, typename Tile>
constexpr int packs_together() {
  if (!Op::Access::kStoresTogether) {
    return 1;
  }
  return Tile::kVectors % 4 == 0   ? 4
         : Tile::kVectors % 3 == 0 ? 3
         : Tile::kVectors % 2 == 0 ? 2
                                   : 1;
}

// What a thread does with one row after the other. Rows_: where the packs of a row are.
template <typename Op, typename Tile, typename Rows_ = StagedRows<Op, Tile>>
class RowBackward {
  using Norm = typename Op::Norm;
  using A = typename Op::A;
  using X = typename Op::X;
  using GradOutput = typename Op::GradOutput;
  static constexpr int N = Tile::kPack;
  static constexpr int kVectors = Tile::kVectors;
  static constexpr int kTogether = packs_together<Op, Tile>();
  static constexpr bool kWholePacks = Tile::kWidth > 0 && Tile::kWidth % N == 0;
  static constexpr int kKept = Tile::kKeep ? kVectors : 1;

 public:
  using Rows = Rows_;
  using RowLane = typename Rows::RowLane;
  using Parameters = LaneParameters<typename Op::Epilogue::template Parameters<N>, Tile>;
  using Sums = ParameterSums<N, A>;
  static constexpr int kGroupBytes = Rows::kGroupBytes + Parameters::kGroupBytes;

  // `shared`: of this lane's group, for parameters that do not stay in registers.
  __device__ __forceinline__ RowBackward(const NormBackwardArgs& args, const Rows& rows,
                                         std::uint32_t shared, const RowLane& lane, int lane_of_row)
      : args_(args),
        lane_(lane),
        lane_of_row_(lane_of_row),
        staged_(rows),
        parameters_(shared, lane_of_row) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      parameters_.put(i, Op::Epilogue::template load<Norm, typename Op::Access, N>(
                             args, lane.col(i), lane.template valid<N>(i) > 0));
    }
  }

  __device__ __forceinline__ void advance_to(std::int64_t row) { staged_.advance_to(row); }
  __device__ __forceinline__ void release() { staged_.release(); }

  // What this lane has of the row's sums. Adds its terms of the parameters' gradients.
  __device__ __forceinline__ PullbackSums<A> sums(std::int64_t row, const Normalizer<A>& normalizer,
                                                  Sums (&totals)[kVectors]) {
    const typename Op::Epilogue epilogue(args_, row);
    PullbackSums<A> sums{A(0), A(0)};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (takes_part(i / kTogether * kTogether)) {
        A(&xhat)[N] = xhat_[Tile::kKeep ? i : 0];
        A(&grad)[N] = grad_[Tile::kKeep ? i : 0];
        const Pack<X, N> x = staged_.template load<0>(i);
        const Pack<GradOutput, N> dy = staged_.template load<1>(i);
        expand(epilogue, x, dy, i, normalizer, xhat, grad, totals[i]);
        // Past the row's end is anything; what the totals gain by it is not stored.
        const int valid = lane_.template valid<N>(i);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          if (Op::Access::kWhole || valid > (kWholePacks ? 0 : j)) {
            sums.add(grad[j], xhat[j]);
          }
        }
      }
    }
    return sums;
  }

  // dx, and what arrives through the sum, to where gradients leave.
  __device__ __forceinline__ void leave(std::int64_t row, const Normalizer<A>& normalizer,
                                        const Pullback<Norm, A>& pullback) {
    const typename Op::Epilogue epilogue(args_, row);
    const typename Op::Source source(args_, row);
#pragma unroll
    for (int first = 0; first < kVectors; first += kTogether) {
      if (takes_part(first)) {
        typename Op::Source::template Gradients<N, kTogether> gradients;
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          const int i = first + k;
          A(&xhat)[N] = xhat_[Tile::kKeep ? i : 0];
          A(&grad)[N] = grad_[Tile::kKeep ? i : 0];
          Sums ignored{};
          if constexpr (!Tile::kKeep) {
            expand(epilogue, staged_.template load<0>(i), staged_.template load<1>(i), i,
                   normalizer, xhat, grad, ignored);
          }
          A dx[N];
#pragma unroll
          for (int j = 0; j < N; ++j) {
            dx[j] = pullback(grad[j], xhat[j]);
          }
          if constexpr (Op::Source::kReadsSum) {
            if (Op::Source::sum_arrives(args_)) {
              A arriving[N];
              to_values(staged_.template load<2>(i), arriving);
#pragma unroll
              for (int j = 0; j < N; ++j) {
                dx[j] += arriving[j];
              }
            }
          }
          source.leave(lane_.col(i), dx, k, gradients);
        }
        source.template store<typename Op::Access>(lane_, first, gradients);
      }
    }
  }

 private:
  // Whether this lane has elements in pack i of the row, or, by Words, a lane of its row has.
  __device__ __forceinline__ bool takes_part(int i) const {
    return i + kTogether <= RowLane::kSure ||
           lane_.width > lane_.col(i) - (Op::Access::kWhole ? 0 : lane_of_row_ * N);
  }

  // x̂ and its gradient.
  __device__ __forceinline__ void expand(const typename Op::Epilogue& epilogue, const Pack<X, N>& x,
                                         const Pack<GradOutput, N>& dy, int i,
                                         const Normalizer<A>& normalizer, A (&xhat)[N],
                                         A (&grad)[N], Sums& totals) {
    cuda::expand<Op>(epilogue, parameters_.get(i), lane_.col(i), x, dy, normalizer, xhat, grad,
                     totals);
  }

  const NormBackwardArgs& args_;
  RowLane lane_;
  int lane_of_row_;
  Rows staged_;
  Parameters parameters_;
  A xhat_[kKept][N];  // of the row at hand
  A grad_[kKept][N];
};

// The sums of a row over its lanes and warps, valid in all of them. parts: [warps] in shared
// memory.
template <typename Norm, typename Tile, typename A>
__device__ __forceinline__ PullbackSums<A> sum_over_row(PullbackSums<A> sums,
                                                        PullbackSums<A>* parts,
                                                        const BackwardPlace& place) {
  const auto over_lanes = [&]<int kCount>() {
    sums.wdy_xhat = lane_sum<kCount>(sums.wdy_xhat);
    if constexpr (Norm::kCentered) {
      sums.wdy = lane_sum<kCount>(sums.wdy);
    }
  };
  over_lanes.template operator()<Tile::kLanes>();
  if (!Tile::kOneWarp && place.warps > 1) {
    if (place.lane == 0) {
      parts[place.warp] = sums;
    }
    row_barrier(place.team, place.warps * kWarpSize);
    constexpr int kMost = Tile::kWidth > 0 ? Tile::kWarps : Tile::kThreads / kWarpSize;
    constexpr int kCount = kMost > 16 ? 32 : kMost > 8 ? 16 : kMost > 4 ? 8 : kMost > 2 ? 4 : 2;
    const int part = place.lane % kCount;
    const A nothing = A(-0.0);  // adding it changes no bit, whatever kCount
    sums = part < place.warps ? parts[part] : PullbackSums<A>{nothing, nothing};
    over_lanes.template operator()<kCount>();
  }
  return sums;
}

// The first row comes into the L2 cache while the kernel before still runs, and the weight, once.
template <typename Op, typename Tile>
__device__ __forceinline__ void prefetch_first_row(const NormBackwardArgs& args, std::int64_t row,
                                                   int width, const BackwardPlace& place) {
  const auto span = [&]<typename T>(const T* of_row) {
    const int first = place.warp * Tile::kWarpCols;
    const int bytes = min(width - first, Tile::kWarpCols) * static_cast<int>(sizeof(T));
    const char* const begin = reinterpret_cast<const char*>(of_row + first);
#pragma unroll
    for (int at = 0; at < Tile::kWarpCols * static_cast<int>(sizeof(T));
         at += Tile::kLanes * kVectorBytes) {
      if (at + place.lane * kVectorBytes < bytes) {
        prefetch(begin + at + place.lane * kVectorBytes);
      }
    }
  };
  if (row < args.rows) {
    span(first_of<typename Op::X, false>(args.x, row));
    span(first_of<typename Op::GradOutput, false>(args.grad_output, row));
  }
  if (row == 0 && args.weight != nullptr) {  // for all rows
    span(static_cast<const typename Op::Epilogue::Parameter*>(args.weight));
  }
}

// The sums of a CTA's rows in shared memory, [groups, kGrads, columns], and from there to one row
// of partial sums, or to the gradients themselves where no other CTA has any.
template <typename Op, typename Tile>
class ColumnSums {
  using A = typename Op::A;
  using W = typename Op::Epilogue::Parameter;
  static constexpr int N = Tile::kPack;
  static constexpr int kVectors = Tile::kVectors;
  static constexpr int kGrads = Op::Norm::kGrads;
  static constexpr int kFour = kVectorBytes / static_cast<int>(sizeof(A));  // columns at a time
  static constexpr int kBlock = N < kFour ? N : kFour;
  using Sums = ParameterSums<N, A>;

 public:
  __device__ __forceinline__ ColumnSums(const BackwardPlace& place, int first_col, uint4* shared)
      : place_(place),
        first_col_(first_col),
        row_cols_(place.warps * Tile::kWarpCols),
        thread_(place.team * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)),
        threads_(static_cast<int>(blockDim.x * blockDim.y)),
        sums_(reinterpret_cast<A*>(shared)) {}

  // Rows that share a warp are added first.
  __device__ __forceinline__ void collect(Sums (&totals)[kVectors]) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int offset = kWarpSize / 2; offset >= Tile::kLanes; offset /= 2) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
          totals[i].weight[j] += __shfl_xor_sync(kAllLanes, totals[i].weight[j], offset);
          if constexpr (kGrads == 2) {
            totals[i].bias[j] += __shfl_xor_sync(kAllLanes, totals[i].bias[j], offset);
          }
        }
      }
      if (thread_ % kWarpSize < Tile::kLanes) {
        A* const mine = sums_ + group() * kGrads * row_cols_;
        put(mine, i, totals[i].weight);
        if constexpr (kGrads == 2) {
          put(mine + row_cols_, i, totals[i].bias);
        }
      }
    }
  }

  // After a barrier: a thread adds up whole columns. partials: null in a grid of one CTA.
  __device__ __forceinline__ void leave(const NormBackwardArgs& args, int width,
                                        A* partials) const {
    const int groups =
        Tile::kLanes < kWarpSize ? threads_ / kWarpSize : static_cast<int>(blockDim.y);
    const std::int64_t stride = partials_stride(width);
    const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kGrads;
#pragma unroll
    for (int grad = 0; grad < kGrads; ++grad) {
      for (int col = thread_ * kFour; col < width; col += threads_ * kFour) {
        A sums[kFour];
        add_groups(groups, grad, col, sums);
        if (partials != nullptr) {
          std::uint32_t words[4];
          memcpy(words, sums, sizeof(words));
          store_bytes<kVectorBytes>(partials + (row + grad) * stride + col, words);
        } else {
          void* const target = grad == 0 ? args.grad_weight : args.grad_bias;
#pragma unroll
          for (int j = 0; j < kFour; ++j) {
            if (target != nullptr && col + j < width) {
              const A value[1] = {sums[j]};
              store_bytes<sizeof(W)>(static_cast<W*>(target) + col + j, rounded<W>(value).words);
            }
          }
        }
      }
    }
  }

 private:
  __device__ __forceinline__ int group() const {
    return Tile::kLanes < kWarpSize ? thread_ / kWarpSize : place_.team;
  }
  // Lanes that store eight columns in two blocks of 16 bytes each meet in half of the banks, unless
  // every other four of them change the blocks.
  __device__ __forceinline__ static int place_of(int col) {
    return N == 2 * kFour ? col ^ (col / 8 & 4) : col;
  }
  __device__ __forceinline__ void put(A* sums, int i, const A (&values)[N]) const {
#pragma unroll
    for (int first = 0; first < N; first += kBlock) {
      std::uint32_t words[kBlock * sizeof(A) / 4];
      memcpy(words, values + first, sizeof(words));
      const int col = first_col_ + i * Tile::kStep + first;
      store_bytes<kBlock * sizeof(A)>(sums + place_of(col), words);
    }
  }
  __device__ __forceinline__ void add_groups(int groups, int grad, int col,
                                             A (&sums)[kFour]) const {
    const A* from = sums_ + grad * row_cols_ + place_of(col);
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
      sums[j] = 0;
    }
#pragma unroll 8
    for (int group = 0; group < groups; ++group) {
      const uint4 block = *reinterpret_cast<const uint4*>(from);
      A addends[kFour];
      memcpy(addends, &block, sizeof(block));
#pragma unroll
      for (int j = 0; j < kFour; ++j) {
        sums[j] += addends[j];
      }
      from += kGrads * row_cols_;
    }
  }

  const BackwardPlace& place_;
  int first_col_;
  int row_cols_;
  int thread_;
  int threads_;
  A* sums_;
};

// A team's rows one after the other, from `first_row` on.
template <typename Op, typename Tile>
__device__ __forceinline__ void take_rows(
    const NormBackwardArgs& args, const BackwardSteps& steps, const BackwardPlace& place, int width,
    std::int64_t first_row, RowBackward<Op, Tile>& backward,
    typename RowBackward<Op, Tile>::Sums (&totals)[Tile::kVectors]) {
  using Norm = typename Op::Norm;
  using A = typename Op::A;
  __shared__ PullbackSums<A> parts[2][Tile::kThreads / kWarpSize];
  const A inverse_cols = reciprocal(static_cast<A>(width));
  const bool wanted = Op::Source::wanted(args);
  // Statistics are read a row ahead, by every lane. (Copied asynchronously with their rows: share
  // of add 0.95 0.85 at 65536x1024, 0.97 0.86 at 16384x4096, RMSNorm; H200, bf16.)
  const auto saved_of = [&](std::int64_t row) {
    const A* const stats = static_cast<const A*>(args.stats);
    return row < args.rows ? Norm::saved(stats, row, args.rows) : SavedStats<A>{A(0), A(0)};
  };
  SavedStats<A> saved = saved_of(first_row);
  int parity = 0;
  // Teams past the last row go along: the CTA has barriers.
  for (std::int64_t row = first_row; row - place.team < args.rows; row += steps.rows) {
    const bool live = row < args.rows;
    const Normalizer<A> normalizer = saved.normalizer();
    saved = saved_of(row + steps.rows);
    backward.advance_to(row);
    PullbackSums<A> sums{A(0), A(0)};
    if (live) {
      sums = backward.sums(row, normalizer, totals);
    }
    // Two buffers in turn: one barrier a row is enough.
    sums = sum_over_row<Norm, Tile>(sums, parts[parity] + place.team * place.warps, place);
    parity ^= 1;
    if (live && wanted) {
      backward.leave(row, normalizer, Pullback<Norm, A>(sums, normalizer, inverse_cols));
    }
    backward.release();
  }
}

// partials: [gridDim.x, Norm::kGrads, partials_stride(cols)], or null where the grid is one CTA,
// whose sums are the gradients already. block: (threads of a row, rows side by side). Dynamic
// shared memory: RowBackward::kGroupBytes for each kLanes threads.
template <typename Op, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    backward_kernel(const __grid_constant__ NormBackwardArgs args,
                    const __grid_constant__ BackwardSteps steps, typename Op::A* partials) {
  using Backward = RowBackward<Op, Tile>;
  constexpr int N = Tile::kPack;
  static_assert(2 * Backward::Rows::kStageBytes >=
                    Op::Norm::kGrads * Tile::kWarpCols * static_cast<int>(sizeof(typename Op::A)),
                "two rows in flight leave room for the column sums");
  static_assert(Tile::kWarpCols * sizeof(typename Op::A) % kVectorBytes == 0);
  alignas(kStagedAlignment) extern __shared__ uint4 shared[];
  const int width = Tile::kWidth > 0 ? Tile::kWidth : static_cast<int>(args.cols);
  const BackwardPlace place = backward_place<Tile>();
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + place.team;
  if constexpr (!Op::Source::kAtTwoStrides) {
    prefetch_first_row<Op, Tile>(args, first_row, width, place);
  }
  await_kernels_before();
  const typename Backward::RowLane lane{place.warp * Tile::kWarpCols + place.lane * N, width, true};
  const int group = place.team * place.warps + place.warp;
  const std::uint32_t own = shared_address(shared) + group * Backward::kGroupBytes;
  const typename Backward::Rows rows(args, steps, own, first_row, lane, place.lane);
  Backward backward(args, rows, own + Backward::Rows::kGroupBytes, lane, place.lane);
  typename Backward::Sums totals[Tile::kVectors];
#pragma unroll
  for (int i = 0; i < Tile::kVectors; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      totals[i].weight[j] = 0;
      totals[i].bias[j] = 0;
    }
  }
  take_rows<Op, Tile>(args, steps, place, width, first_row, backward, totals);
  if (args.grad_weight == nullptr && args.grad_bias == nullptr) {
    return;
  }
  await_copies<0>();  // shared memory is free for other use after the barrier
  __syncthreads();
  const ColumnSums<Op, Tile> columns(place, lane.first, shared);
  columns.collect(totals);
  __syncthreads();
  columns.leave(args, width, partials);
}

}  // namespace fused_op::cuda
