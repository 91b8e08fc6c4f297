// Turns the gradients of the parameters, as the threads of a CTA of backward_kernel hold them, into
// one row of partial sums. Device code; torch-free.
#pragma once

#include "core/convert.h"
#include "core/epilogue.h"
#include "core/norm_args.h"
#include "cuda/access.cuh"
#include "cuda/backward_op.cuh"
#include "cuda/backward_tile.h"
#include "cuda/row_sum.cuh"

namespace fused_op::cuda {

// Where a thread stands. A team is the threads of one row; a CTA has blockDim.y teams.
struct BackwardPlace {
  int team;
  int lane;   // number of the lane, below kLanes
  int warp;   // number of the warp in its row
  int warps;  // warps of the row
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

// Adds up the sums of a CTA's rows in shared memory, [groups, kGrads, columns]. Writes them as one
// row of partial sums, or as the gradients themselves if no other CTA has any.
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

  // Stores the sums of all threads in shared memory. Those of rows that share a warp are added
  // first.
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

  // To be called after a barrier. A thread adds up whole columns and stores them. partials: null if
  // the grid, or with groups each group, has one CTA.
  __device__ __forceinline__ void leave(const typename Op::Args& args, int width,
                                        A* partials) const {
    if constexpr (Op::Epilogue::kGrouped) {
      leave_group(args, width, partials);
      return;
    }
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
              store_value(static_cast<W*>(target) + col + j, sums[j]);
            }
          }
        }
      }
    }
  }

 private:
  // The columns of a group are only a part of a row of partial sums, or of the gradients.
  __device__ __forceinline__ void leave_group(const typename Op::Args& args, int width,
                                              A* partials) const {
    const int groups =
        Tile::kLanes < kWarpSize ? threads_ / kWarpSize : static_cast<int>(blockDim.y);
    const auto of_row = static_cast<unsigned>(args.groups);
    const std::int64_t first = blockIdx.x % of_row * std::int64_t{width};
    const std::int64_t part = static_cast<std::int64_t>(blockIdx.x / of_row) * kGrads;
    const std::int64_t end = of_row * std::int64_t{width};
#pragma unroll
    for (int grad = 0; grad < kGrads; ++grad) {
      const std::int64_t row = (part + grad) * partials_stride(end);
      // What is added up later is read in whole vectors.
      if (partials != nullptr && first == 0 && end + thread_ < partials_stride(end)) {
        partials[row + end + thread_] = 0;
      }
      void* const target = grad == 0 ? args.grad_weight : args.grad_bias;
      for (int col = thread_ * kFour; col < width; col += threads_ * kFour) {
        A sums[kFour];
        add_groups(groups, grad, col, sums);
#pragma unroll
        for (int j = 0; j < kFour; ++j) {
          if (col + j >= width) {
            continue;
          }
          if (partials != nullptr) {
            partials[row + first + col + j] = sums[j];
          } else if (target != nullptr) {
            store_value(static_cast<W*>(target) + first + col + j, sums[j]);
          }
        }
      }
    }
  }
  __device__ __forceinline__ int group() const {
    return Tile::kLanes < kWarpSize ? thread_ / kWarpSize : place_.team;
  }
  // A lane stores eight columns in two blocks of 16 bytes each. Every other four lanes swap the
  // places of their blocks; otherwise each store would use only half of the banks.
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

}  // namespace fused_op::cuda
