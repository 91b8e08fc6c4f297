// The backward kernel for rows that fit into one CTA. It reads x and dy once, ahead of time
// (staged_rows.cuh), and takes two passes over a row in shared memory or registers: one for the
// sums that dx needs, one for dx. The parameter gradients stay in registers over all rows of a CTA
// and leave as one row of partial sums, which add_partials_kernel adds up in a fixed order. No
// atomics. The tile, integers that the plan chose, says which threads hold a row. Compiled by nvcc
// and by NVRTC; torch-free.
#pragma once

#include <type_traits>

#include "core/norm_args.h"
#include "core/norm_math.h"
#include "cuda/access.cuh"
#include "cuda/backward_halves.cuh"
#include "cuda/backward_op.cuh"
#include "cuda/backward_tile.h"
#include "cuda/column_sums.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/staged_rows.cuh"
#include "cuda/words.cuh"

namespace fused_op::cuda {

// Packs that are computed together, because Words stores several in one branch.
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

// What a thread does with one row after another. Rows_ says where the packs of a row are.
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
  using Args = typename Op::Args;
  using Beside = typename Op::template BesidePack<N>;

 public:
  using Rows = Rows_;
  using RowLane = typename Rows::RowLane;
  using Parameters = LaneParameters<typename Op::Epilogue::template Parameters<N>, Tile>;
  using Sums = ParameterSums<N, A>;
  static constexpr int kGroupBytes = Rows::kGroupBytes + Parameters::kGroupBytes;

  // `shared` belongs to this lane's group, for parameters that do not stay in registers. They are
  // the parameters of `row` and of all later rows.
  __device__ __forceinline__ RowBackward(const Args& args, const Rows& rows, std::uint32_t shared,
                                         const RowLane& lane, int lane_of_row, std::int64_t row)
      : args_(args),
        lane_(lane),
        lane_of_row_(lane_of_row),
        staged_(rows),
        parameters_(shared, lane_of_row),
        halves_(args, row, lane.first) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      parameters_.put(i, Op::Epilogue::template load<Norm, typename Op::Access, N>(
                             args, row, lane.col(i), lane.template valid<N>(i)));
    }
  }

  __device__ __forceinline__ void advance_to(std::int64_t row) { staged_.advance_to(row); }
  __device__ __forceinline__ void release() { staged_.release(); }

  // For a row in halves: see backward_halves.cuh.
  __device__ __forceinline__ void take_halves(std::int64_t next_row) {
    if constexpr (kPairsHalves<Op, Tile>) {
      halves_.advance(args_, next_row, lane_.first);
      halves_.dy[0] = staged_.template load<1>(0);
      halves_.dy[1] = staged_.template load<1>(1);
    }
  }

  // This lane's share of the row's sums. Adds its terms to the parameter gradients.
  __device__ __forceinline__ PullbackSums<A> sums(std::int64_t row, const Normalizer<A>& normalizer,
                                                  Sums (&totals)[kVectors]) {
    const typename Op::Epilogue epilogue(args_, row);
    PullbackSums<A> sums{A(0), A(0)};
    Beside beside[kTogether];  // becomes its gradients
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (takes_part(i / kTogether * kTogether)) {
        A(&xhat)[N] = xhat_[Tile::kKeep ? i : 0];
        A(&grad)[N] = grad_[Tile::kKeep ? i : 0];
        const Pack<X, N> x = staged_.template load<0>(i);
        const Pack<GradOutput, N> dy = staged_.template load<1>(i);
        beside[i % kTogether] = beside_of(i);
        expand(epilogue, x, dy, i, normalizer, beside[i % kTogether], xhat, grad, totals[i]);
        // Past the end of the row, elements are arbitrary; what they add to the totals is not
        // stored.
        const int valid = lane_.template valid<N>(i);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          if (Op::Access::kWhole || valid > (kWholePacks ? 0 : j)) {
            sums.add(grad[j], xhat[j]);
          }
        }
        if constexpr (Op::Epilogue::kReadsBeside) {
          if (i % kTogether == kTogether - 1) {
            epilogue.template store_beside<typename Op::Access>(lane_, i + 1 - kTogether, beside);
          }
        }
      }
    }
    return sums;
  }

  // Computes dx, adds the gradient that arrives at the sum, and stores it where gradients are
  // wanted.
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
            Beside beside = beside_of(i);
            expand(epilogue, staged_.template load<0>(i), staged_.template load<1>(i), i,
                   normalizer, beside, xhat, grad, ignored);
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
          if constexpr (Op::Source::kReadsBeside) {
            source.leave(staged_.template load<0>(i), beside_of(i), dx, k, gradients);
          } else {
            source.leave(lane_.col(i), dx, k, gradients);
          }
        }
        source.template store<typename Op::Access>(lane_, first, gradients);
      }
    }
  }

 private:
  // Whether this lane, or with Words any lane of its row, has elements in pack i.
  __device__ __forceinline__ bool takes_part(int i) const {
    return i + kTogether <= RowLane::kSure ||
           lane_.width > lane_.col(i) - (Op::Access::kWhole ? 0 : lane_of_row_ * N);
  }

  __device__ __forceinline__ Beside beside_of(int i) const {
    if constexpr (Op::kReadsBeside) {
      return staged_.template load<2>(i);
    } else {
      return {};
    }
  }

  // Computes x̂ and its gradient.
  __device__ __forceinline__ void expand(const typename Op::Epilogue& epilogue, const Pack<X, N>& x,
                                         const Pack<GradOutput, N>& dy, int i,
                                         const Normalizer<A>& normalizer, Beside& beside,
                                         A (&xhat)[N], A (&grad)[N], Sums& totals) {
    if constexpr (kPairsHalves<Op, Tile>) {
      A values[N], other[N];
      to_values(halves_.dy[i], values);
      to_values(halves_.dy[1 - i], other);
      load_xhat<Op>(epilogue, parameters_.get(i), x, beside, normalizer, xhat);
      epilogue.template pullback_halves<Norm>(parameters_.get(i), halves_.of_row, i == 1,
                                              lane_.col(i), xhat, values, other, grad, totals);
    } else {
      cuda::expand<Op>(epilogue, parameters_.get(i), lane_.col(i), x, dy, beside, normalizer, xhat,
                       grad, totals);
    }
  }

  const Args& args_;
  RowLane lane_;
  int lane_of_row_;
  Rows staged_;
  Parameters parameters_;
  A xhat_[kKept][N];  // of the current row
  A grad_[kKept][N];
  Halves<Op, Tile> halves_;
};

// The sums of a row over its lanes and warps, valid in all threads. parts: [warps] in shared
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
    const A nothing = A(-0.0);  // adding it changes no bits, whatever kCount is
    sums = part < place.warps ? parts[part] : PullbackSums<A>{nothing, nothing};
    over_lanes.template operator()<kCount>();
  }
  return sums;
}

// Prefetches the first row into the L2 cache while the previous kernel still runs, and the weight
// once.
template <typename Op, typename Tile>
__device__ __forceinline__ void prefetch_first_row(const typename Op::Args& args, std::int64_t row,
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
    if constexpr (Op::kReadsBeside) {
      span(first_of<StreamElement<Op, 2>, false>(Op::third(args), row));
    }
  }
  if (row == 0 && args.weight != nullptr) {  // once for all rows
    span(static_cast<const typename Op::Epilogue::Parameter*>(args.weight));
  }
}

// The sums of the warps of a row, for one row and the next.
template <typename A, typename Tile>
using WarpParts = PullbackSums<A>[2][Tile::kThreads / kWarpSize];

// Processes the rows of a team one after another, from `first_row` on. `shared` belongs to this
// lane's group.
template <typename Op, typename Tile>
__device__ __forceinline__ void take_rows(
    const typename Op::Args& args, const BackwardSteps& steps, const BackwardPlace& place,
    int first_col, int width, std::int64_t first_row, std::uint32_t shared,
    WarpParts<typename Op::A, Tile>& parts,
    typename RowBackward<Op, Tile>::Sums (&totals)[Tile::kVectors]) {
  using Norm = typename Op::Norm;
  using A = typename Op::A;
  using Backward = RowBackward<Op, Tile>;
  using Rows = typename Backward::Rows;
  const typename Backward::RowLane lane{first_col, width, true};
  const Rows rows(args, steps, shared, first_row, lane, place.lane);
  Backward backward(args, rows, shared + Rows::kGroupBytes, lane, place.lane, first_row);
  const A inverse_cols = reciprocal(static_cast<A>(width));
  const bool wanted = Op::Source::wanted(args);
  // Every lane reads statistics a row ahead. If they were copied asynchronously with their rows,
  // the share of add would fall from 0.95 to 0.85 at 65536x1024, and from 0.97 to 0.86 at
  // 16384x4096 (RMSNorm, bf16, H200).
  const auto saved_of = [&](std::int64_t row) {
    const A* const stats = static_cast<const A*>(args.stats);
    return row < args.rows ? Norm::saved(stats, row, args.rows) : SavedStats<A>{A(0), A(0)};
  };
  SavedStats<A> saved = saved_of(first_row);
  int parity = 0;
  // Teams past the last row take part, because the CTA has barriers.
  const std::int64_t last_row = last_row_of<Op, Tile>(args, steps);
  for (std::int64_t row = first_row; row - place.team * rows_apart<Op>(args) < last_row;
       row += steps.rows) {
    const bool live = row < last_row;
    const Normalizer<A> normalizer = saved.normalizer();
    saved = saved_of(row + steps.rows);
    backward.advance_to(row);
    PullbackSums<A> sums{A(0), A(0)};
    if (live) {
      backward.take_halves(row + steps.rows);
      sums = backward.sums(row, normalizer, totals);
    }
    // Because two buffers take turns, one barrier for each row is enough.
    if constexpr (Norm::kStats > 0) {
      sums = sum_over_row<Norm, Tile>(sums, parts[parity] + place.team * place.warps, place);
    }
    parity ^= 1;
    if (live && wanted) {
      backward.leave(row, normalizer, Pullback<Norm, A>(sums, normalizer, inverse_cols));
    }
    backward.release();
  }
}

// Which calls have code of their own for full warps. us without and with (H200): LayerNorm 146 124
// at 43662x1537, 167 135 at 10920x6145, 177 150 at 6711x9999 (bf16), 224 209 at 43662x1537 (f32);
// with a residual 162 155 at 13104x5121 (bf16).
template <typename Norm, typename X, bool kSplit, typename W, typename Y, typename Access>
constexpr bool kHasFullWarps<BackwardOp<Norm, Plain<X, kSplit>, Affine<W, Y>, Access>> =
    sizeof(X) <= 4 && !Access::kWhole;
template <typename Norm, typename X, typename W, typename Access>
constexpr bool kHasFullWarps<BackwardOp<Norm, AddResidual<X, X, X>, Affine<W, X>, Access>> =
    sizeof(X) <= 4 && !Access::kWhole;

// partials: [gridDim.x, Norm::kGrads, partials_stride(cols)], or null if the grid is one CTA, whose
// sums are the gradients. block: (threads of a row, rows side by side). Dynamic shared memory:
// RowBackward::kGroupBytes for every kLanes threads.
template <typename Op, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    backward_kernel(const __grid_constant__ typename Op::Args args,
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
  const std::int64_t first_row = first_row_of<Op, Tile>(args, steps, place.team);
  if constexpr (!Op::Source::kAtTwoStrides) {
    prefetch_first_row<Op, Tile>(args, first_row, width, place);
  }
  await_kernels_before();
  const int first_col = place.warp * Tile::kWarpCols + place.lane * N;
  const int group = place.team * place.warps + place.warp;
  const std::uint32_t own = shared_address(shared) + group * Backward::kGroupBytes;
  typename Backward::Sums totals[Tile::kVectors];
#pragma unroll
  for (int i = 0; i < Tile::kVectors; ++i) {
    totals[i].clear();
  }
  __shared__ WarpParts<typename Op::A, Tile> parts;
  const auto take = [&]<typename Warp>() {
    take_rows<Op, Warp>(args, steps, place, first_col, width, first_row, own, parts, totals);
  };
  constexpr bool kSplits = kHasFullWarps<Op> && kLastWarpDiffers<Tile>;
  const bool is_full = kSplits && place.warp + 1 < Tile::kWarps;
  if constexpr (kSplits) {
    if (is_full) {
      take.template operator()<FullWarp<Tile>>();
    }
  }
  if (!is_full) {
    take.template operator()<Tile>();
  }
  if (args.grad_weight == nullptr && args.grad_bias == nullptr) {
    return;
  }
  await_copies<0>();  // shared memory is free for other use after the barrier
  __syncthreads();
  const ColumnSums<Op, Tile> columns(place, first_col, shared);
  columns.collect(totals);
  __syncthreads();
  columns.leave(args, width, partials);
}

}  // namespace fused_op::cuda
