// The forward of short rows, of which a warp holds many side by side: a thread takes its vectors of
// kShortRows rows, and loads weight and bias once for all of them. norm_forward_kernel, whose bits
// these are, starts twice as many CTAs. H200, bf16, LayerNorm, share of the limit there and here:
// 0.93 1.00 at 4194304x8 (there forward_flat.cuh), 0.83 0.97 at x16, 0.96 0.99 at 1048576x64.
// Longer rows have no registers to spare: 0.98 0.94 at 524288x128. Included by launch_*.cu only;
// torch-free.
#pragma once

#include <algorithm>

#include "core/norm_args.h"
#include "core/row_source.h"
#include "cuda/dependent_launch.cuh"
#include "cuda/forward.cuh"
#include "cuda/row_access.cuh"
#include "cuda/row_tile.h"

namespace fused_op::cuda {

// Threads of a CTA: as in ForwardBounds. H200, bf16, us with 256 and with 128: 64.7 64.4 at
// 2097152x32, 64.7 64.2 at 1048576x64, but 67.4 70.2 at 4194304x16, a vector a thread.
template <typename Tile>
constexpr int kShortThreads = kShortTileThreads / Tile::kVectors;
constexpr int kShortRows = 2;

// Whether rows of this tile are taken so. Of fp32, only where a row is two vectors: 0.90 0.98 at
// 4194304x8, but 1.01 0.99 at x16.
template <typename Source, typename Access, typename Tile>
constexpr bool kIsShort =
    std::is_same_v<Source, Plain<typename Source::Element>> && Access::kWholePacks &&
    (sizeof(typename Source::Element) == 2
         ? Tile::kLanes * Tile::kVectors <= 8
         : sizeof(typename Source::Element) == 4 && Tile::kLanes == 2 && Tile::kVectors == 1);

// CTAs of a multiprocessor: 40 registers a thread for one vector, 64 for two, more for wide
// parameters.
template <typename W, typename T, typename Tile>
constexpr int kShortCtas = std::min(kMostSmThreads, (Tile::kVectors > 1 ? 1024 : 1536) -
                                                        (sizeof(W) > sizeof(T) ? 256 : 0)) /
                           kShortThreads<Tile>;

// Row r of this thread.
template <typename Tile>
__device__ __forceinline__ std::int64_t short_row(int r) {
  constexpr int kApart = kShortThreads<Tile> / Tile::kLanes;
  return static_cast<std::int64_t>(blockIdx.x) * (kApart * kShortRows) + r * kApart +
         static_cast<int>(threadIdx.x) / Tile::kLanes;
}

// The rest for row r of the threads of a warp where one's is not trusted(): as in
// norm_forward_kernel.
template <typename W, typename Norm, typename T, typename Tile>
__device__ __noinline__ void finish_untrusted_short_row(const NormForwardArgs& args, int r) {
  using A = Accumulator<T>;
  constexpr int N = kVector<T>;
  constexpr int kLanes = Tile::kLanes;
  const int width = static_cast<int>(args.cols);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const bool is_live = short_row<Tile>(r) < args.rows;
  const std::int64_t row = is_live ? short_row<Tile>(r) : args.rows - 1;
  Pack<T, N> packs[Tile::kVectors];
#pragma unroll
  for (int i = 0; i < Tile::kVectors; ++i) {
    packs[i] = reload<VectorAccess, N>(Plain<T>(args, row), (lane + i * kLanes) * N, width);
  }
  const Moments<A> moments = group_moments<Norm, VectorAccess, kLanes>(
      packs, width - lane * N, static_cast<A>(width), A(1), false);
  const RowPlace place{row, is_live ? width : 0, lane, 0, 1, lane * N, width};
  take_untrusted<W, Norm, Plain<T>, VectorAccess, Tile>(args, place, moments, CtaExchange<A>{});
}

// grid: enough CTAs for all rows. FullAccess: all of their rows are there.
template <typename W, typename Norm, typename T, typename Access, typename Tile>
__global__ void __launch_bounds__(kShortThreads<Tile>, kShortCtas<W, T, Tile>)
    norm_forward_short_kernel(const __grid_constant__ NormForwardArgs args) {
  using Source = Plain<T>;
  using A = Accumulator<T>;
  constexpr int N = Source::kElements;
  constexpr int kLanes = Tile::kLanes;
  constexpr int kVectors = Tile::kVectors;
  constexpr int kApart = kShortThreads<Tile> / kLanes;  // rows of a thread

  const int width = static_cast<int>(args.cols);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const std::int64_t first_row = short_row<Tile>(0);
  const auto col_of = [&](int i) { return (lane + i * kLanes) * N; };
  const int left =
      static_cast<int>(min(args.rows - first_row, static_cast<std::int64_t>(kApart * kShortRows)));
  // Threads past the last row take it along, and store nothing.
  const auto is_live = [&](int r) { return kIsFull<Access> || r * kApart < left; };
  const auto row_of_turn = [&](int r) {
    return is_live(r) ? first_row + r * kApart : args.rows - 1;
  };

  if (blockIdx.x < kPrefetchingCtas) {
#pragma unroll
    for (int r = 0; r < kShortRows; ++r) {
      prefetch_row<kVectors>(row_of<T>(args.input, row_of_turn(r)), col_of(0), kLanes * N, width);
    }
  }
  await_kernels_before();
  // A lane with a row of its own would spill a register.
  constexpr bool kKept = !kIsFull<Access> && kLanes > 1;
  using RowAccess = std::conditional_t<kKept, KeptAccess, Access>;
  Pack<T, N> packs[kShortRows][kVectors];
#pragma unroll
  for (int r = 0; r < kShortRows; ++r) {
    const Source source(args, row_of_turn(r));
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      packs[r][i] = source.template fetch<RowAccess, N>(col_of(i), width);
    }
  }
  Affine<W, Norm, N, Access> affine[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    affine[i] = {args, col_of(i), width};
  }
  const A cols = static_cast<A>(width);
  const A inverse_cols = reciprocal(cols);
  unsigned untrusted = 0;  // a bit a row
#pragma unroll
  for (int r = 0; r < kShortRows; ++r) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      stay_packed(packs[r][i]);
      stay_packed(affine[i].weight);
      if constexpr (Norm::kCentered) {
        stay_packed(affine[i].bias);
      }
    }
    const Moments<A> moments =
        group_moments<Norm, Access, kLanes>(packs[r], width - lane * N, cols, A(1), false);
    if (!__all_sync(kAllLanes, trusted(moments, cols))) {
      untrusted |= 1u << r;
      continue;
    }
    const std::int64_t row = row_of_turn(r);
    const int live_width = is_live(r) ? width : 0;
    const Normalizer<A> normalizer =
        normalizer_of<Norm>(args, moments, A(1), inverse_cols, row, is_live(r) && lane == 0);
    T* const target = target_of<Source>(args, row);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      Access::store(target, col_of(i), live_width, output_of(affine[i], packs[r][i], normalizer));
    }
  }
  for (; untrusted != 0; untrusted &= untrusted - 1) {
    finish_untrusted_short_row<W, Norm, T, Tile>(args, __ffs(untrusted) - 1);
  }
}

}  // namespace fused_op::cuda
