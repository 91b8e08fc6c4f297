// The backward kernels. norm_backward_kernel reads x and dy once: rows go through shared memory,
// copied ahead by cp.async. Aligned rows need no barrier for that, since each thread reads back
// only what it copied; shifted ones need their warp's, since a lane also reads its neighbour's
// block. dx leaves at once; the parameter gradients stay in registers over all rows of a CTA and
// leave as one row of partial sums each, which sum_partials_kernel adds in a fixed order. No
// atomics. Longer rows are in backward_long.cuh. Included by launch_*.cu only; torch-free.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "core/norm_args.h"
#include "core/row_source.h"
#include "cuda/row_access.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/row_tile.h"

namespace fused_op::cuda {

// What norm_backward_kernel keeps in shared memory: for each group of a row's kLanes lanes (a warp,
// or less), the 16-byte blocks of its rows in flight, and the weight where registers are short.
template <typename W, typename Source, typename Access, typename Tile>
struct BackwardLayout {
  using T = typename Source::Element;
  static constexpr int N = kVector<T>;
  // Elements of a thread. With few of them, what the first pass over a row makes of them stays in
  // registers for the second (shifted rows, which need more registers: the packs), and so does the
  // weight.
  static constexpr int kOwned = Tile::kVectors * N;
  static constexpr bool kKeepRow = Access::kWholePacks && kOwned * sizeof(Accumulator<T>) <= 64;
  static constexpr bool kKeepPacks =
      !Access::kWholePacks && Tile::kVectors <= (Source::kGradStreams == 2 ? 2 : 1);
  static constexpr bool kKeepWeight = kOwned * sizeof(W) <= 32;
  static constexpr int kWeightBlocks = kKeepWeight ? 0 : kOwned * sizeof(W) / kVectorBytes;
  // Blocks a shifted row has more than vectors. One would do, but where there is room, rows begin
  // at multiples of 128 bytes in shared memory too. (Whole packs need that: one spare block there
  // took 131072x1024, 32768x4096 bf16 from 0.95, 0.94 of the limit to 0.90, 0.86, H200.)
  static constexpr int kSpare = Access::kWholePacks  ? 0
                                : Tile::kVectors > 3 ? 1
                                : Tile::kLanes < 8   ? Tile::kLanes
                                                     : 8;
  static constexpr int kStreamBlocks = Tile::kLanes * Tile::kVectors + kSpare;
  static constexpr int kStageBlocks = Source::kGradStreams * kStreamBlocks;
  static constexpr int group_blocks(int stages) {
    return stages * kStageBlocks + Tile::kLanes * kWeightBlocks;
  }
  // Registers: 128 a thread for several vectors, 85 for one.
  static constexpr bool kLight = Tile::kVectors == 1 && sizeof(Accumulator<T>) == 4;
  static constexpr int kThreads = kLight ? 256 : kMaxRowThreads;
  static constexpr int kCtasPerSm = !kLight                                            ? 1
                                    : Access::kWholePacks && Source::kGradStreams == 2 ? 3
                                                                                       : 2;
  // Rows in flight: three where the longest row of the tile leaves room for them.
  static constexpr int kStages =
      kMaxRowThreads / Tile::kLanes * group_blocks(3) * kVectorBytes <= 226 * 1024 ? 3 : 2;
  static constexpr int kGroupBlocks = group_blocks(kStages);
};

// From one row of a team to its next one, made by the launcher: kernel parameters take no
// registers.
struct RowSteps {
  std::int64_t rows;
  std::int64_t streams[3];  // bytes, in x, dy and the gradient of the sum
  std::int64_t grad_input;  // bytes
};

// An address in shared memory, opaque, so that it stays in its register: the compiler would make it
// anew, in five instructions, for each copy.
__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
  asm volatile("" : "+r"(address));
  return address;
}
// Copies 16 bytes past the L1 cache; __pipeline_commit and __pipeline_wait_prior count them. Before
// sm_80 the thread copies them itself.
__device__ __forceinline__ void copy_async(std::uint32_t to, std::uintptr_t from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#else
  *static_cast<uint4*>(__cvta_shared_to_generic(to)) = *reinterpret_cast<const uint4*>(from);
#endif
}

// A row of partial sums is a whole number of the rows' vectors, so that it is stored in vectors.
template <typename T>
FUSED_OP_HD constexpr std::int64_t partial_stride(std::int64_t cols) {
  return (cols + kVector<T> - 1) / kVector<T> * kVector<T>;
}

// partials: [gridDim.x, Norm::kGrads, partial_stride(cols)], or null where the grid is one CTA,
// whose sums are the gradients already. (A grid of one cluster that adds its sums up through shared
// memory instead: 6.0, 10.5 us against 5.3, 5.4 with partials, 64x1024, 128x2048 bf16, H200.)
template <typename W, typename Norm, typename Source, typename Access, typename Tile>
__global__ void __launch_bounds__(BackwardLayout<W, Source, Access, Tile>::kThreads,
                                  BackwardLayout<W, Source, Access, Tile>::kCtasPerSm)
    norm_backward_kernel(const __grid_constant__ NormBackwardArgs args,
                         const __grid_constant__ RowSteps steps,
                         Accumulator<typename Source::Element>* partials) {
  using T = typename Source::Element;
  using A = Accumulator<T>;
  using Layout = BackwardLayout<W, Source, Access, Tile>;
  constexpr int N = kVector<T>;
  constexpr int kLanes = Tile::kLanes;
  constexpr int kVectors = Tile::kVectors;
  constexpr int kStreams = Source::kGradStreams;
  constexpr int kStages = Layout::kStages;
  constexpr bool kKeepRow = Layout::kKeepRow;
  constexpr bool kKeepPacks = Layout::kKeepPacks;
  constexpr bool kKeepWeight = Layout::kKeepWeight;
  using WeightPack = Pack<W, N>;

#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();  // sum_partials_kernel may be placed, and waits
#endif
  extern __shared__ uint4 shared[];
  __shared__ PullbackSums<A> parts[2][kMaxRowThreads / kWarpSize];

  const int team = threadIdx.y;
  const int lane = threadIdx.x % kLanes;
  const int warps = blockDim.x / kLanes;
  const int warp = threadIdx.x / kLanes;
  const int group = team * warps + warp;
  const int width = static_cast<int>(args.cols);  // a row that fits into one CTA is short
  const int first_col = (warp * kVectors * kLanes + lane) * N;
  const auto col_of = [&](int i) { return first_col + i * kLanes * N; };
  const std::int64_t cta_row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y;
  const std::int64_t first_row = cta_row + team;
  const A inverse_cols = reciprocal(static_cast<A>(width));

  // This lane's blocks. Lane l reads back blocks l and l + 1, of which it copied the first.
  constexpr int kStreamBytes = Layout::kStreamBlocks * kVectorBytes;
  constexpr int kStageBytes = kStreams * kStreamBytes;
  uint4* const blocks = shared + group * Layout::kGroupBlocks + lane;
  const std::uint32_t blocks_at = shared_address(blocks);
  // Where this lane's columns of the next row to copy begin, in each stream.
  const ConstRows* const streams[3] = {&args.x, &args.grad_output, &args.grad_sum};
  std::uintptr_t ahead[kStreams];
#pragma unroll
  for (int s = 0; s < kStreams; ++s) {
    ahead[s] = reinterpret_cast<std::uintptr_t>(row_of<T>(*streams[s], first_row) + first_col);
  }
  const int row_bytes = (width - first_col) * static_cast<int>(sizeof(T));  // from here on
  constexpr int kStride = kLanes * kVectorBytes;  // from a lane's vector to its next
  const auto copy_ahead = [&](std::int64_t row, std::uint32_t to) {
    if (row < args.rows) {
#pragma unroll
      for (int s = 0; s < kStreams; ++s) {
        const int shift = Access::kWholePacks ? 0 : static_cast<int>(ahead[s] % kVectorBytes);
#pragma unroll
        for (int i = 0; i < kVectors + (Access::kWholePacks ? 0 : 1); ++i) {
          if (i * kStride < row_bytes + shift && (i < kVectors || lane == 0)) {
            copy_async(to + s * kStreamBytes + i * kStride, ahead[s] - shift + i * kStride);
          }
        }
      }
    }
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      ahead[s] += steps.streams[s];
    }
    __pipeline_commit();  // an empty group too: the count of groups is the count of rows
  };

#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    copy_ahead(first_row + stage * steps.rows, blocks_at + stage * kStageBytes);
  }
  // Where registers are left, statistics are read a row ahead, like the row itself.
  constexpr bool kRoomy = Access::kWholePacks || kKeepPacks;
  const A* stats = static_cast<const A*>(args.stats) + first_row;
  const auto next_saved = [&](bool live) {
    const A* const here = stats;
    stats += steps.rows;
    return live ? Norm::saved(here, 0, args.rows) : SavedStats<A>{};
  };
  SavedStats<A> saved = kRoomy ? next_saved(first_row < args.rows) : SavedStats<A>{};
  WeightPack kept[kKeepWeight ? kVectors : 1];
  const auto* weight = static_cast<const W*>(args.weight);
  constexpr int kWeightParts = sizeof(WeightPack) / kVectorBytes;
  uint4* const weight_blocks = blocks + kStages * Layout::kStageBlocks;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    WeightPack pack = load_parameters<N>(weight, col_of(i), width, 1);
    Access::clip(width - col_of(i), pack);
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

  A dweight[kVectors][N] = {};
  A dbias[kVectors][N] = {};
  std::uint32_t here = blocks_at;  // the row at hand; `free` is where the one before it was
  std::uint32_t free = blocks_at + (kStages - 1) * kStageBytes;
  int parity = 0;
  T* dx = static_cast<T*>(args.grad_input) + first_row * args.cols;
  for (std::int64_t row = first_row; row - team < args.rows; row += steps.rows) {
    const bool live = row < args.rows;
    const int live_width = live ? width : 0;
    if constexpr (!kRoomy) {
      saved = next_saved(live);
    }
    const Normalizer<A> normalizer = saved.normalizer();
    if constexpr (kRoomy) {
      saved = next_saved(row + steps.rows < args.rows);
    }
    if constexpr (!Access::kWholePacks) {
      __syncwarp();  // the neighbours have read what is overwritten now
    }
    copy_ahead(row + (kStages - 1) * steps.rows, free);
    __pipeline_wait_prior(kStages - 1);
    if constexpr (!Access::kWholePacks) {
      __syncwarp();  // their blocks have arrived too
    }

    // Lanes that take part in vector i: for shifted rows all of a warp, since they exchange.
    const auto takes_part = [&](int i) {
      return Access::kWholePacks ? col_of(i) < live_width : col_of(i) - lane * N < width;
    };
    const auto staged = [&](int stream, int i) {
      return Access::template load_staged<N, T>(
          here + stream * kStreamBytes + i * kStride,
          static_cast<int>((ahead[stream] - kStages * steps.streams[stream]) % kVectorBytes));
    };
    const auto expand = [&](const Pack<T, N>& x_pack, const Pack<T, N>& dy_pack, int i, A(&xhat)[N],
                            A(&dy)[N], A(&wdy)[N]) {
      unpack(x_pack, xhat);
      unpack(dy_pack, dy);
      weight_of(i, wdy);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        xhat[j] = Norm::normalized(xhat[j], normalizer);
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
        Pack<T, N> x_pack = staged(0, i);
        Pack<T, N> dy_pack = staged(1, i);
        Access::clip(live_width - col_of(i), x_pack, dy_pack);
        if constexpr (kKeepPacks) {
          kept_packs[0][i] = x_pack;
          kept_packs[1][i] = dy_pack;
        }
        expand(x_pack, dy_pack, i, xhat, dy, wdy);
#pragma unroll
        for (int j = 0; j < N; ++j) {  // past the row's end dy is 0, and so is every term
          sums.add(wdy[j], xhat[j]);
          dweight[i][j] = multiply_add(dy[j], xhat[j], dweight[i][j]);
          dbias[i][j] += dy[j];
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
      row_barrier(team, blockDim.x);
      sums = {};
      for (int w = 0; w < warps; ++w) {
        sums.wdy_xhat += row_parts[w].wdy_xhat;
        sums.wdy += row_parts[w].wdy;
      }
      parity ^= 1;
    }
    if (args.grad_input != nullptr) {
      const Pullback<Norm, A> pullback(sums, normalizer, inverse_cols);
      Pack<T, N> results[kKeepPacks ? kVectors : 1];
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
            expand(staged(0, i), staged(1, i), i, xhat, dy, wdy);  // not clipped, nor stored there
          }
#pragma unroll
          for (int j = 0; j < N; ++j) {
            xhat[j] = pullback(wdy[j], xhat[j]);
          }
          if constexpr (kStreams == 3) {
            unpack(staged(2, i), dy);
#pragma unroll
            for (int j = 0; j < N; ++j) {
              xhat[j] += dy[j];
            }
          }
          results[kKeepPacks ? i : 0] = pack_from<T, N>(xhat);
          if constexpr (!kKeepPacks) {
            Access::template store_row<kLanes>(dx, col_of(i), live_width, results);
          }
        }
      }
      if constexpr (kKeepPacks) {
        Access::template store_row<kLanes>(dx, first_col, live_width, results);
      }
    }
    dx = reinterpret_cast<T*>(reinterpret_cast<char*>(dx) + steps.grad_input);
    free = here;
    here = here == blocks_at + (kStages - 1) * kStageBytes ? blocks_at : here + kStageBytes;
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
  __syncthreads();
  if (thread % kWarpSize < kLanes) {
    A* const mine =
        exchange + (Tile::kOneWarp ? thread / kWarpSize : team) * Norm::kGrads * row_cols;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      VectorAccess::store(mine, col_of(i), row_cols, as_pack(dweight[i]));
      if constexpr (Norm::kGrads == 2) {
        VectorAccess::store(mine + row_cols, col_of(i), row_cols, as_pack(dbias[i]));
      }
    }
  }
  __syncthreads();
  constexpr int kFour = kVectorBytes / sizeof(A);  // columns at a time
  const int stride = static_cast<int>(partial_stride<T>(width));
#pragma unroll
  for (int grad = 0; grad < Norm::kGrads; ++grad) {
    for (int col = thread * kFour; col < width; col += threads * kFour) {
      A sums[kFour] = {};
      for (int g = 0; g < groups; ++g) {
        A addends[kFour];
        unpack(VectorAccess::load<kFour>(exchange + (g * Norm::kGrads + grad) * row_cols, col,
                                         row_cols),
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
        auto* const target = static_cast<W*>(grad == 0 ? args.grad_weight : args.grad_bias);
#pragma unroll
        for (int j = 0; j < kFour; ++j) {
          if (target != nullptr && col + j < width) {
            target[col + j] = static_cast<W>(sums[j]);
          }
        }
      }
    }
  }
}

}  // namespace fused_op::cuda
