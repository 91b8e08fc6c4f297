// The backward kernels. norm_backward_kernel reads x and dy once: rows go through shared memory,
// copied ahead (backward_stage.cuh). dx leaves at once; the parameter gradients stay in registers
// over all rows of a CTA and leave as one row of partial sums each, which sum_partials_kernel adds
// in a fixed order. No atomics. Longer rows are in backward_long.cuh. Included by launch_*.cu only;
// torch-free.
#pragma once

#include <type_traits>

#include "core/norm_args.h"
#include "core/row_source.h"
#include "cuda/backward_stage.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/flexible.cuh"
#include "cuda/row_access.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/row_tile.h"
#include "cuda/word_access.cuh"

namespace fused_op::cuda {

// A row of partial sums is a whole number of the rows' vectors, so that it is stored in vectors.
template <typename Source>
FUSED_OP_HD constexpr std::int64_t partial_stride(std::int64_t cols) {
  return (cols + Source::kElements - 1) / Source::kElements * Source::kElements;
}

// How the sums of a row's warps are added: all at once by shuffles, or one after the other, which
// takes longer and fewer registers.
struct ByShuffles {};
struct InTurn {};

// The sums of a row over its `warps` warps, kMaxWarps at most, or kLanes lanes of one; valid in all
// of them. Rows of one CTA are told apart by `team`. parts: [warps] in shared memory.
template <typename Norm, int kLanes, int kMaxWarps, typename Way = ByShuffles, typename A>
__device__ __forceinline__ PullbackSums<A> row_sum(PullbackSums<A> sums, PullbackSums<A>* parts,
                                                   int team, int warp, int warps) {
  const auto over_lanes = [&]<int kCount>() {
    sums.wdy_xhat = lane_sum<kCount>(sums.wdy_xhat);
    if constexpr (Norm::kCentered) {
      sums.wdy = lane_sum<kCount>(sums.wdy);
    }
  };
  over_lanes.template operator()<kLanes>();
  if (warps > 1) {
    if (threadIdx.x % kLanes == 0) {
      parts[warp] = sums;
    }
    row_barrier(team, warps * kWarpSize);
    if constexpr (std::is_same_v<Way, InTurn>) {
      sums = {};
#pragma unroll 4
      for (; warps > 0; --warps, ++parts) {
        sums.wdy_xhat += parts->wdy_xhat;
        sums.wdy += parts->wdy;
      }
    } else {
      constexpr int kCount = kMaxWarps > 16 ? 32 : 16;
      const int part = static_cast<int>(threadIdx.x) % kCount;
      const A nothing = A(-0.0);  // adding it changes no bit, whatever kCount
      sums = part < warps ? parts[part] : PullbackSums<A>{nothing, nothing};
      over_lanes.template operator()<kCount>();
    }
  }
  return sums;
}

// partials: [gridDim.x, Norm::kGrads, partial_stride(cols)], or null where the grid is one CTA,
// whose sums are the gradients already. (A grid of one cluster that adds its sums up through shared
// memory instead: 6.0, 10.5 us against 5.3, 5.4 with partials, 64x1024, 128x2048 bf16, H200.)
template <typename W, typename Norm, typename Source, typename Access, typename Tile>
__global__ void __launch_bounds__(BackwardLayout<W, Norm, Source, Access, Tile>::kThreads,
                                  BackwardLayout<W, Norm, Source, Access, Tile>::kCtasPerSm)
    norm_backward_kernel(const __grid_constant__ NormBackwardArgs args,
                         const __grid_constant__ RowSteps steps,
                         Accumulator<typename Source::Element>* partials) {
  using T = typename Source::Element;
  using A = Accumulator<T>;
  using Layout = BackwardLayout<W, Norm, Source, Access, Tile>;
  constexpr int N = Layout::N;
  constexpr int kLanes = Tile::kLanes;
  constexpr int kVectors = Tile::kVectors;
  constexpr bool kKeepRow = Layout::kKeepRow;
  constexpr bool kKeepPacks = Layout::kKeepPacks;
  constexpr bool kKeepWeight = Layout::kKeepWeight;
  constexpr bool kStoreRow = Layout::kStoreRow;
  constexpr bool kTwoGradients = Source::kFlexible || Source::kDrops;
  using WeightPack = Pack<typename Layout::P, N>;

  extern __shared__ uint4 shared[];
  __shared__ PullbackSums<A> parts[2][kMaxBackwardWarps];

  const int team = threadIdx.y;
  const int lane = threadIdx.x % kLanes;
  const int warps = blockDim.x / kLanes;
  const int warp = threadIdx.x / kLanes;
  const int group = team * warps + warp;
  const int stages = stages_of<Layout>(steps);
  const int width = static_cast<int>(args.cols);  // a row that fits into one CTA is short
  constexpr int kElements = kRun<Access, T, N>;
  const int warp_col = warp * kVectors * kLanes * N;
  const int first_col = warp_col + lane * kElements;
  const auto col_of = [&](int i) { return first_col + i * kLanes * N; };
  const std::int64_t cta_row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y;
  const std::int64_t first_row = cta_row + team;
  const A inverse_cols = reciprocal(static_cast<A>(width));

  // Not with dropout, which has no register to spare for it.
  if constexpr (!Source::kFlexible && !Source::kSplit && !Source::kDrops) {
    const int col = warp_col + lane * N;
    if (first_row < args.rows) {
      prefetch_row<kVectors>(row_of<T>(args.x, first_row), col, kLanes * N, width);
      prefetch_row<kVectors>(row_of<T>(args.grad_output, first_row), col, kLanes * N, width);
    }
    if (first_row == 0 && args.weight != nullptr) {  // for all rows
      prefetch_row<kVectors>(static_cast<const W*>(args.weight), col, kLanes * N, width);
    }
  }
  await_kernels_before();
  uint4* const blocks = shared + group * Layout::group_blocks(stages) + lane;
  StagedRows<W, Norm, Source, Access, Tile> staged(args, steps, shared_address(blocks), first_row,
                                                   warp_col + lane * N, lane);
  // Where registers are left, statistics are read a row ahead, like the row itself, or each row
  // waits for them. H200, bf16, us of LayerNorm with dropout without and with that: 206 169 at
  // 1048576x64, 415 330 at 524288x256, 368 341 at 174762x768, 371 336 at 10922x12288. Two vectors
  // with dropout have none (345 421 at 16384x8192), and shifted rows in the WideTile gain nothing.
  constexpr bool kRoomy = !Access::kShifts || kKeepPacks;
  constexpr bool kSavedAhead = Source::kDrops ? kVectors != 2 : Layout::kKeeps || !Access::kShifts;
  const A* stats = static_cast<const A*>(args.stats) + first_row;
  const auto next_saved = [&](bool live) {
    const A* const here = stats;
    stats += steps.rows;
    return live ? Norm::saved(here, 0, args.rows) : SavedStats<A>{};
  };
  SavedStats<A> saved = kSavedAhead ? next_saved(first_row < args.rows) : SavedStats<A>{};
  WeightPack kept[kKeepWeight ? kVectors : 1];
  constexpr int kWeightParts = sizeof(WeightPack) / kVectorBytes;
  uint4* const weight_blocks = blocks + stages * Layout::kStageBlocks;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const WeightPack pack = lane_weight<W, T, N, Access>(args, col_of(i), width);
    if constexpr (kKeepWeight) {
      kept[i] = pack;
    } else {
#pragma unroll
      for (int part = 0; part < kWeightParts; ++part) {
        memcpy(weight_blocks + (i * kWeightParts + part) * kLanes, pack.words + 4 * part,
               kVectorBytes);
      }
    }
  }
  const auto weight_of = [&](int i, A(&values)[N]) {
    if constexpr (kKeepWeight) {
      unpack(kept[i], values);
    } else {
      WeightPack pack;
#pragma unroll
      for (int part = 0; part < kWeightParts; ++part) {
        memcpy(pack.words + 4 * part, weight_blocks + (i * kWeightParts + part) * kLanes,
               kVectorBytes);
      }
      unpack(pack, values);
    }
  };

  const DropoutState dropout(args.dropout);
  A dweight[kVectors][N] = {};
  A dbias[kVectors][N] = {};
  int parity = 0;
  T* dx = static_cast<T*>(args.grad_input.data) + first_row * args.cols;
  for (std::int64_t row = first_row; row - team < args.rows; row += steps.rows) {
    const bool live = row < args.rows;
    const int live_width = live ? width : 0;
    if constexpr (!kSavedAhead) {
      saved = next_saved(live);
    }
    const Normalizer<A> normalizer = saved.normalizer();
    if constexpr (kSavedAhead) {
      saved = next_saved(row + steps.rows < args.rows);
    }
    staged.advance_to(row);

    // Lanes that take part in vector i: where they share blocks all of a warp, since they exchange.
    const auto takes_part = [&](int i) {
      return !Access::kSharesBlocks ? col_of(i) < live_width : col_of(i) - lane * kElements < width;
    };
    const auto expand = [&](const Pack<T, N>& x_pack, const Pack<T, N>& dy_pack, int i, A(&xhat)[N],
                            A(&dy)[N], A(&wdy)[N]) {
      unpack(x_pack, xhat);
      unpack(dy_pack, dy);
      weight_of(i, wdy);
      if constexpr (Source::kFlexible) {
        if (args.dropout.active && !args.drops_input) {
          DropoutRow(dropout, row).apply(args.dropout, col_of(i), dy);
        }
        if (args.x_is_output) {
          xhat_of_output(args, col_of(i), wdy, xhat);
#pragma unroll
          for (int j = 0; j < N; ++j) {
            wdy[j] *= dy[j];
          }
          return;
        }
      }
      // Flexible packs hold zeros past the row's end, and x̂ of those might be infinite.
      constexpr bool kEndsInPack = Source::kFlexible && Norm::kCentered;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const bool valid = !kEndsInPack || col_of(i) + j < width;
        xhat[j] = valid ? Norm::normalized(xhat[j], normalizer) : A(0);
        wdy[j] *= dy[j];
      }
    };

    Pack<T, N> kept_packs[2][kKeepPacks ? kVectors : 1];
    A kept_xhat[kKeepRow ? kVectors : 1][N], kept_wdy[kKeepRow ? kVectors : 1][N];
    PullbackSums<A> sums{};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (takes_part(i)) {
        A dy[N];
        A(&xhat)[N] = kept_xhat[kKeepRow ? i : 0];
        A(&wdy)[N] = kept_wdy[kKeepRow ? i : 0];
        Pack<T, N> x_pack = staged.load(0, i);
        Pack<T, N> dy_pack = staged.load(1, i);
        if constexpr (Access::kSharesBlocks) {
          Access::clip_to(normalizer.mean, live_width - col_of(i), x_pack, dy_pack);
        }
        if constexpr (kKeepPacks) {
          kept_packs[0][i] = x_pack;
          kept_packs[1][i] = dy_pack;
        }
        expand(x_pack, dy_pack, i, xhat, dy, wdy);
#pragma unroll
        for (int j = 0; j < N; ++j) {  // past the row's end dy is 0, x̂ finite, and every term 0
          sums.add(wdy[j], xhat[j]);
          dweight[i][j] = multiply_add(dy[j], xhat[j], dweight[i][j]);
          dbias[i][j] += dy[j];
        }
      }
    }
    using Way = std::conditional_t<Source::kDrops && Norm::kCentered, InTurn, ByShuffles>;
    // Two buffers in turn: one barrier a row is enough.
    sums = row_sum<Norm, kLanes, Tile::kCtaThreads / kWarpSize, Way>(
        sums, parts[parity] + team * warps, team, warp, warps);
    parity ^= 1;
    if (args.grad_input.data != nullptr || (kTwoGradients && args.grad_residual.data != nullptr)) {
      const Pullback<Norm, A> pullback(sums, normalizer, inverse_cols);
      Pack<T, N> results[kStoreRow ? kVectors : 1];
      // Many shifted vectors: one at a time, nothing kept, or the registers do not suffice.
#pragma unroll(kRoomy ? kVectors : 1)
      for (int i = 0; i < kVectors; ++i) {
        if (takes_part(i)) {
          A dy[N];
          A(&xhat)[N] = kept_xhat[kKeepRow ? i : 0];
          A(&wdy)[N] = kept_wdy[kKeepRow ? i : 0];
          if constexpr (kKeepPacks) {
            expand(kept_packs[0][i], kept_packs[1][i], i, xhat, dy, wdy);
          } else if constexpr (!kKeepRow) {
            expand(staged.load(0, i), staged.load(1, i), i, xhat, dy, wdy);  // not clipped
          }
#pragma unroll
          for (int j = 0; j < N; ++j) {
            xhat[j] = pullback(wdy[j], xhat[j]);
          }
          if (kTwoGradients ? args.grad_sum.data != nullptr : Source::kGradStreams == 3) {
            unpack(staged.load(2, i), dy);
#pragma unroll
            for (int j = 0; j < N; ++j) {
              xhat[j] += dy[j];
            }
          }
          if constexpr (Source::kFlexible) {
            store_row_gradients(args, dropout, row, col_of(i), width, xhat);
          } else if constexpr (Source::kDrops) {
            if (args.grad_residual.data != nullptr) {
              T* const target = static_cast<T*>(args.grad_residual.data) + row * args.cols;
              Access::store(target, col_of(i), live_width, pack_from<T, N>(xhat));
            }
            if (args.grad_input.data != nullptr) {
              DropoutRow(dropout, row).apply(args.dropout, col_of(i), xhat);
              Access::store(dx, col_of(i), live_width, pack_from<T, N>(xhat));
            }
          } else {
            results[kStoreRow ? i : 0] = pack_from<T, N>(xhat);
            if constexpr (!kStoreRow) {
              Access::template store_row<kLanes>(dx, col_of(i), live_width, results);
            }
          }
        }
      }
      if constexpr (kStoreRow) {
        Access::template store_row<kLanes>(dx, first_col, live_width, results);
      }
    }
    dx = reinterpret_cast<T*>(reinterpret_cast<char*>(dx) + steps.grad_input);
    staged.release();
  }
  if (args.grad_weight == nullptr && args.grad_bias == nullptr) {
    return;
  }
  __pipeline_wait_prior(0);  // shared memory is free for other use after the next barrier

  // The rows side by side in this CTA: first those that share a warp,
  A* const sums_of[2] = {&dweight[0][0], &dbias[0][0]};
  constexpr int kOwned = Layout::kOwned;
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
  // then all of them, side by side in shared memory: a thread adds up whole columns.
  const int row_cols = warps * kVectors * kLanes * N;
  const int thread = team * blockDim.x + threadIdx.x;
  const int threads = blockDim.x * blockDim.y;
  const int groups = Tile::kOneWarp ? threads / kWarpSize : blockDim.y;
  A* const exchange = reinterpret_cast<A*>(shared);  // [groups, Norm::kGrads, row_cols]
  constexpr int kFour = kVectorBytes / sizeof(A);    // columns at a time
  static_assert(2 * Layout::kStageBlocks * kVectorBytes >=
                    2 * kLanes * kVectors * N * static_cast<int>(sizeof(A)),
                "two rows in flight leave room for the exchange");
  // Lanes that store eight columns in two blocks of 16 bytes each meet in half of the banks, unless
  // every other four of them change the blocks.
  constexpr int kBlock = kElements < kFour ? kElements : kFour;
  const auto swapped = [](int col) { return kElements == 2 * kFour ? col ^ (col / 8 & 4) : col; };
  __syncthreads();
  if (thread % kWarpSize < kLanes) {
    A* const mine =
        exchange + (Tile::kOneWarp ? thread / kWarpSize : team) * Norm::kGrads * row_cols;
    const auto store = [&](A* sums, int col, const A(&values)[N]) {
#pragma unroll
      for (int first = 0; first < N; first += kBlock) {
        A block[kBlock];
        memcpy(block, values + first, sizeof(block));
        const int at = col + first % kElements + first / kElements * kElements * kLanes;
        VectorAccess::store(sums, swapped(at), row_cols, as_pack(block));
      }
    };
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      store(mine, col_of(i), dweight[i]);
      if constexpr (Norm::kGrads == 2) {
        store(mine + row_cols, col_of(i), dbias[i]);
      }
    }
  }
  __syncthreads();
  const int stride = static_cast<int>(partial_stride<Source>(width));
#pragma unroll
  for (int grad = 0; grad < Norm::kGrads; ++grad) {
    for (int col = thread * kFour; col < width; col += threads * kFour) {
      A sums[kFour] = {};
#pragma unroll 8
      for (int g = 0; g < groups; ++g) {
        A addends[kFour];
        unpack(VectorAccess::load<kFour>(exchange + (g * Norm::kGrads + grad) * row_cols,
                                         swapped(col), row_cols),
               addends);
#pragma unroll
        for (int j = 0; j < kFour; ++j) {
          sums[j] += addends[j];
        }
      }
      if (partials != nullptr) {
        const std::int64_t part = static_cast<std::int64_t>(blockIdx.x) * Norm::kGrads + grad;
        VectorAccess::store(partials + part * stride, col, stride, as_pack(sums));
      } else {
        void* const target = grad == 0 ? args.grad_weight : args.grad_bias;
#pragma unroll
        for (int j = 0; j < kFour; ++j) {
          if (target != nullptr && col + j < width) {
            store_gradient<W>(target, args.param_dtype, col + j, sums[j]);
          }
        }
      }
    }
  }
}

}  // namespace fused_op::cuda
