// The forward kernels. A row is read once and kept in registers, packed as it came; its moments are
// taken in two passes over the registers; then it is normalised, scaled and stored.
// norm_forward_kernel holds a row in the registers of one CTA, or of a cluster;
// norm_forward_streamed_kernel takes rows of any length and reads them twice. Included by the
// launch_*.cu files only; torch-free.
#pragma once

#include <type_traits>

#include "core/norm_args.h"
#include "core/row_source.h"
#include "cuda/row_access.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/row_tile.h"

namespace fused_op::cuda {

// Moments of what kLanes neighbouring lanes hold, valid in every lane: `count` elements, of which
// `left` columns begin at this lane's first one (its vectors are kLanes apart). Elements past the
// row's end are zero on entry and stay out of the deviations. `refined` takes a pass more for the
// mean.
template <typename Norm, typename Access, int kLanes, int kVectors, int N, typename T, typename A>
__device__ __forceinline__ Moments<A> group_moments(const Pack<T, N> (&row)[kVectors], int left,
                                                    A count, A scale, bool refined) {
  Moments<A> moments{};
  // Σ of term(x - mean). Short chains of sums, one a vector: a long one lets the scheduler unpack
  // the whole row ahead of it, which takes twice the registers.
  const auto sum = [&](auto&& add_term) {
    A total = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int valid = left - i * kLanes * N;
      A x[N];
      A part = 0;
      unpack(row[i], x);
      if (Access::kWholePacks || valid >= N) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
          part = add_term(x[j] * scale - moments.mean, part);
        }
      } else {
#pragma unroll
        for (int j = 0; j < N; ++j) {
          part = add_term(j < valid ? x[j] * scale - moments.mean : A(0), part);
        }
      }
      total += valid > 0 ? part : A(0);
    }
    return lane_sum<kLanes>(total);
  };
  const auto itself = [](A deviation, A part) { return part + deviation; };
  const auto square = [](A deviation, A part) { return multiply_add(deviation, deviation, part); };
  if constexpr (Norm::kCentered) {
    const A inverse_count = count > A(0) ? reciprocal(count) : A(0);
    moments.mean = sum(itself) * inverse_count;
    if (refined) {
      moments.mean += sum(itself) * inverse_count;
    }
    if constexpr (sizeof(T) >= 4) {  // means of 16-bit elements need no correction below rounding
      moments.rest = sum(itself) * inverse_count;
    }
  }
  moments.second = sum(square) - count * moments.rest * moments.rest;
  return moments;
}

// The output of one vector.
template <typename W, typename Norm, int N, typename T, typename A, typename Col>
__device__ __forceinline__ Pack<T, N> output_of(const NormForwardArgs& args, const Pack<T, N>& pack,
                                                Col col, Col width,
                                                const Normalizer<A>& normalizer) {
  A x[N], w[N], b[N];
  unpack(pack, x);
  unpack(load_parameters<N>(static_cast<const W*>(args.weight), col, width, 1), w);
  if constexpr (Norm::kCentered) {
    unpack(load_parameters<N>(static_cast<const W*>(args.bias), col, width, 0), b);
  }
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const A xhat = Norm::normalized(x[j], normalizer);
    x[j] = Norm::kCentered ? multiply_add(xhat, w[j], b[j]) : xhat * w[j];
  }
  return pack_from<T, N>(x);
}

template <typename Tile, typename A>
using ForwardExchange =
    std::conditional_t<Tile::kCluster, ClusterExchange<kMaxParts, A>, CtaExchange<kMaxCtaParts, A>>;

// Where a thread of norm_forward_kernel stands.
struct RowPlace {
  std::int64_t row;
  bool live;  // threads past the last row shuffle along and store nothing
  int lane;
  int warp;
  int warps;
  int first_col;
};

// The rest of norm_forward_kernel for a warp in which a row's moments are not trusted(): takes
// those rows again from memory, one vector at a time. A function of its own that ends the kernel,
// so that the common path pays for it neither in registers nor in length.
template <typename W, typename Norm, typename Source, typename Access, typename Tile, typename A>
__device__ __noinline__ void finish_untrusted(const NormForwardArgs& args, const RowPlace& place,
                                              Moments<A> moments,
                                              const ForwardExchange<Tile, A>& exchange) {
  using T = typename Source::Element;
  constexpr int N = kVector<T>;
  constexpr int kLanes = Tile::kLanes;
  const T* const row = Source(args, place.row).row();
  const int width = static_cast<int>(args.cols);
  const A cols = static_cast<A>(width);
  const A inverse_cols = reciprocal(cols);
  const auto col_of = [&](int i) { return place.first_col + i * kLanes * N; };
  const bool trust = trusted(moments, cols);
  A scale = 1;
#pragma unroll 1
  for (int attempt = 0; attempt < 2; ++attempt) {
    const A next_scale = attempt == 0 ? A(1) : Limits<A>::kScale;
    WarpMoments<A> mine{};
#pragma unroll 1
    for (int i = 0; i < Tile::kVectors; ++i) {
      const Pack<T, N> pack[1] = {Access::template load<N>(row, col_of(i), width)};
      const int in_row = min(max(width - (col_of(i) - place.lane * N), 0), kLanes * N);
      const A count = static_cast<A>(in_row);
      mine = append(mine, {count, group_moments<Norm, Access, kLanes>(pack, width - col_of(i),
                                                                      count, next_scale, true)});
    }
    Moments<A> refined = mine.moments;
    if (place.warps > 1) {
      exchange.barrier();  // read by all before it is written again
      exchange.put(place.warp, mine);
      exchange.barrier();
      refined = merge_parts<Norm::kCentered, ForwardExchange<Tile, A>::kMaxParts>(
          exchange.parts, place.warps, cols, inverse_cols);
    }
    if (!trust && (attempt == 0 || overflowed(moments))) {
      moments = refined;
      scale = next_scale;
    }
  }
  const Normalizer<A> normalizer =
      Norm::normalizer(moments, scale, inverse_cols, static_cast<A>(args.eps));
  if (args.stats != nullptr && place.live && place.lane == 0 && place.warp == 0) {
    Norm::save(normalizer, moments, static_cast<A*>(args.stats), place.row, args.rows);
  }
  T* const output = static_cast<T*>(args.output) + place.row * args.cols;
#pragma unroll 1
  for (int i = 0; i < Tile::kVectors; ++i) {
    const Pack<T, N> pack = Access::template load<N>(row, col_of(i), width);
    const Pack<T, N> result[1] = {output_of<W, Norm>(args, pack, col_of(i), width, normalizer)};
    Access::template store_row<kLanes>(output, col_of(i), place.live ? width : 0, result);
  }
}

// grid: enough CTAs for all rows; block: whole rows (one row if it takes more than one warp); with
// Tile::kCluster, a cluster a row.
template <typename W, typename Norm, typename Source, typename Access, typename Tile>
__global__ void __launch_bounds__(ForwardBounds<W, Source, Access, Tile>::kThreads,
                                  ForwardBounds<W, Source, Access, Tile>::kCtasPerSm)
    norm_forward_kernel(const __grid_constant__ NormForwardArgs args) {
  using T = typename Source::Element;
  using A = Accumulator<T>;
  constexpr int N = kVector<T>;
  constexpr int kLanes = Tile::kLanes;
  constexpr int kVectors = Tile::kVectors;

  constexpr int kWarpCols = kVectors * kLanes * N;
  const int width = static_cast<int>(args.cols);  // a row that fits into registers is short
  const bool one_warp = !Tile::kCluster && (Tile::kOneWarp || width <= kWarpCols);
  const int lane = threadIdx.x % kLanes;
  int warps = 1;
  int warp = 0;
  std::int64_t my_row = blockIdx.x;
  if (one_warp) {
    my_row = static_cast<std::int64_t>(blockIdx.x) * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  } else {
    warps = (width + kWarpCols - 1) / kWarpCols;
    warp = threadIdx.x / kWarpSize;
  }
#if __CUDA_ARCH__ >= 900
  if constexpr (Tile::kCluster) {
    const auto cluster = cooperative_groups::this_cluster();
    my_row /= cluster.num_blocks();
    warp += static_cast<int>(cluster.block_rank() * (blockDim.x / kWarpSize));
  }
#endif
  using Exchange = ForwardExchange<Tile, A>;
  __shared__ WarpMoments<A> parts[Exchange::kMaxParts];
  const Exchange exchange{parts};
  exchange.begin();
  const bool live = my_row < args.rows;  // the others shuffle along and store nothing
  const std::int64_t row = live ? my_row : args.rows - 1;

  const Source source(args, row);
  const int first_col = (warp * kVectors * kLanes + lane) * N;
  const auto col_of = [&](int i) { return first_col + i * kLanes * N; };
  Pack<T, N> packs[kVectors];
  typename Source::template Fetched<N> fetched[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    fetched[i] = source.template fetch<Access, N>(col_of(i), width);
  }
  source.template finish<Access, kLanes>(fetched, packs, first_col, live ? width : 0);

  const A cols = static_cast<A>(width);
  const A inverse_cols = reciprocal(cols);
  // A cluster's last warps may have nothing.
  const A count = static_cast<A>(max(min(width - warp * kWarpCols, kWarpCols), 0));
  Moments<A> moments =
      group_moments<Norm, Access, kLanes>(packs, width - first_col, count, A(1), false);
  exchange.ready();
  if (warps > 1) {
    if (warp < warps) {
      exchange.put(warp, {count, moments});
    }
    exchange.barrier();
    moments = merge_parts<Norm::kCentered, Exchange::kMaxParts>(parts, warps, cols, inverse_cols);
  }
  // The same decision in every thread of a row; rows that share a warp go together.
  if (!__all_sync(kAllLanes, trusted(moments, cols))) {
    const RowPlace place{row, live, lane, warp, warps, first_col};
    finish_untrusted<W, Norm, Source, Access, Tile>(args, place, moments, exchange);
    return;
  }
  const Normalizer<A> normalizer =
      Norm::normalizer(moments, A(1), inverse_cols, static_cast<A>(args.eps));
  if (args.stats != nullptr && live && lane == 0 && warp == 0) {
    Norm::save(normalizer, moments, static_cast<A*>(args.stats), row, args.rows);
  }
  T* output = static_cast<T*>(args.output) + row * args.cols;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    packs[i] = output_of<W, Norm>(args, packs[i], col_of(i), width, normalizer);
  }
  Access::template store_row<kLanes>(output, first_col, live ? width : 0, packs);
}

// Rows longer than the registers of a CTA: one CTA a row, read a second time for the output. Its
// parts are those of ClusterTile, merged in the same order: both give the same bits.
template <typename W, typename Norm, typename Source, typename Access>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    norm_forward_streamed_kernel(const __grid_constant__ NormForwardArgs args) {
  using T = typename Source::Element;
  using A = Accumulator<T>;
  constexpr int N = kVector<T>;
  constexpr int kVectors = ClusterTile::kVectors;
  constexpr int kPartCols = kVectors * kWarpSize * N;

  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const std::int64_t row = blockIdx.x;
  const Source source(args, row);
  const A cols = static_cast<A>(args.cols);
  const A inverse_cols = reciprocal(cols);
  const std::int64_t row_parts = (args.cols + kPartCols - 1) / kPartCols;

  __shared__ WarpMoments<A> parts[kMaxParts];
  const CtaExchange<kMaxParts, A> exchange{parts};
  const auto row_moments = [&](A scale, bool refined) {
    exchange.barrier();  // read by all before it is written again
    for (std::int64_t part = warp; part < row_parts; part += kMaxCtaParts) {
      const std::int64_t begin = part * kPartCols;
      Pack<T, N> packs[kVectors];
      typename Source::template Fetched<N> fetched[kVectors];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        fetched[i] =
            source.template fetch<Access, N>(begin + (i * kWarpSize + lane) * N, args.cols);
      }
      source.template finish<Access, kWarpSize>(fetched, packs, begin + lane * N, args.cols);
      const int in_row = valid_elements(begin, args.cols, kPartCols);
      const A count = static_cast<A>(in_row);
      WarpMoments<A> mine{count, group_moments<Norm, Access, kWarpSize>(packs, in_row - lane * N,
                                                                        count, scale, refined)};
      const int slot = static_cast<int>(part % kMaxParts);
      if (part >= kMaxParts) {  // this warp filled the slot before
        __syncwarp();
        mine = append(parts[slot], mine);
      }
      __syncwarp();
      exchange.put(slot, mine);
    }
    exchange.barrier();
    return merge_parts<Norm::kCentered, kMaxParts>(
        parts, static_cast<int>(row_parts < kMaxParts ? row_parts : kMaxParts), cols, inverse_cols);
  };
  // Attempts: as it is, refined, refined and scaled; one copy of the code.
  A scale = 1;
  Moments<A> moments = row_moments(scale, false);
#pragma unroll 1
  for (int attempt = 1; attempt < 3; ++attempt) {
    if (attempt == 1 ? trusted(moments, cols) : !overflowed(moments)) {
      break;
    }
    scale = attempt == 1 ? A(1) : Limits<A>::kScale;
    moments = row_moments(scale, true);
  }
  const Normalizer<A> normalizer =
      Norm::normalizer(moments, scale, inverse_cols, static_cast<A>(args.eps));
  if (args.stats != nullptr && threadIdx.x == 0) {
    Norm::save(normalizer, moments, static_cast<A*>(args.stats), row, args.rows);
  }

  const T* values = source.row();
  T* output = static_cast<T*>(args.output) + row * args.cols;
  for (std::int64_t part = warp; part < row_parts; part += kMaxCtaParts) {
    const std::int64_t begin = part * kPartCols;
    Pack<T, N> results[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      results[i] = Access::template load<N>(values, begin + (i * kWarpSize + lane) * N, args.cols);
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      results[i] = output_of<W, Norm>(args, results[i], begin + (i * kWarpSize + lane) * N,
                                      args.cols, normalizer);
    }
    Access::template store_row<kWarpSize>(output, begin + lane * N, args.cols, results);
  }
}

}  // namespace fused_op::cuda
