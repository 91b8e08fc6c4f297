// The forward kernels. A row is read once and kept in registers, packed as it came; its moments are
// taken in two passes over the registers; then it is normalised, scaled and stored.
// norm_forward_kernel holds a row in the registers of one CTA. Shorter rows are in
// forward_flat.cuh and forward_short.cuh, odd ones in forward_words.cuh, longer ones in
// forward_long.cuh. Included by launch_*.cu only; torch-free.
#pragma once

#include <type_traits>

#include "core/norm_args.h"
#include "core/row_source.h"
#include "cuda/dependent_launch.cuh"
#include "cuda/flexible.cuh"
#include "cuda/row_access.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/row_tile.h"

namespace fused_op::cuda {

// Calls add_terms(x·scale - from, totals) for this lane's elements x, of which `left` columns begin
// at its first one (its vectors are kLanes apart). Elements past the row's end stay out. row[i] is
// the Pack<T, N> of vector i. Short chains of sums, one a vector: a long one lets the scheduler
// unpack the whole row ahead of it, which takes twice the registers.
template <typename Access, int kLanes, int kVectors, int N, typename Row, typename A, int kTerms,
          typename AddTerms>
__device__ __forceinline__ void add_deviations(const Row& row, int left, A scale, A from,
                                               A (&totals)[kTerms], AddTerms&& add_terms) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int valid = left - i * kLanes * N;
    A x[N];
    A parts[kTerms] = {};
    unpack(row[i], x);
    if (Access::kWholePacks || valid >= N) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        add_terms(x[j] * scale - from, parts);
      }
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        add_terms(j < valid ? x[j] * scale - from : A(0), parts);
      }
    }
#pragma unroll
    for (int k = 0; k < kTerms; ++k) {
      totals[k] += kIsFull<Access> || valid > 0 ? parts[k] : A(0);
    }
  }
}

// Moments of what kLanes neighbouring lanes hold, valid in every lane: `count` elements, in packs
// as in add_deviations, zero past the row's end. `refined` takes a pass more for the mean.
// spread(total) adds up what other warps hold of a group. Many warps hide that the second pass
// waits for the first: one pass about a pivot, as in forward_long.cuh, was slower here (H200, bf16,
// share of the limit: 0.99 0.95 at 65536x2048), and so was a mean by tensor cores, as a product
// with ones (0.97 0.96 at 32768x4096, 1.06 1.19 us at 1x1024).
template <typename Norm, typename Access, int kLanes, int kVectors, int N, typename T, typename Row,
          typename A, typename Spread>
__device__ __forceinline__ Moments<A> group_moments(const Row& row, int left, A count, A scale,
                                                    bool refined, Spread&& spread) {
  Moments<A> moments{};
  const auto sum = [&](auto&& add_term) {
    A total[1] = {};
    add_deviations<Access, kLanes, kVectors, N>(row, left, scale, moments.mean, total, add_term);
    return lane_sum<kLanes>(spread(total[0]));
  };
  const auto itself = [](A deviation, A(&part)[1]) { part[0] += deviation; };
  const auto square = [](A deviation, A(&part)[1]) {
    part[0] = multiply_add(deviation, deviation, part[0]);
  };
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

template <typename Norm, typename Access, int kLanes, int kVectors, int N, typename T, typename A>
__device__ __forceinline__ Moments<A> group_moments(const Pack<T, N> (&row)[kVectors], int left,
                                                    A count, A scale, bool refined) {
  return group_moments<Norm, Access, kLanes, kVectors, N, T>(row, left, count, scale, refined,
                                                             [](A total) { return total; });
}

// Weight and bias of one vector.
template <typename W, typename Norm, int N, typename Access = VectorAccess>
struct Affine {
  Affine() = default;
  Pack<typename ParameterOf<W>::type, N> weight;
  Pack<typename ParameterOf<W>::type, N> bias;

  template <typename Col>
  __device__ __forceinline__ Affine(const NormForwardArgs& args, Col col, Col width)
      : weight(load(args, args.weight, col, width, 1)) {
    if constexpr (Norm::kCentered) {
      bias = load(args, args.bias, col, width, 0);
    }
  }

 private:
  template <typename Col>
  __device__ __forceinline__ static auto load(const NormForwardArgs& args, const void* parameters,
                                              Col col, Col width, float absent) {
    if constexpr (kIsFull<Access>) {
      return load_present_parameters<N>(static_cast<const W*>(parameters), col);
    } else {
      return parameters_of<W, N>(parameters, args.param_dtype, col, width, absent);
    }
  }
};

// The output of one vector.
template <typename W, typename Norm, int N, typename Access, typename T, typename A>
__device__ __forceinline__ Pack<T, N> output_of(const Affine<W, Norm, N, Access>& affine,
                                                const Pack<T, N>& pack,
                                                const Normalizer<A>& normalizer) {
  A x[N], w[N], b[N];
  unpack(pack, x);
  unpack(affine.weight, w);
  if constexpr (Norm::kCentered) {
    unpack(affine.bias, b);
  }
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const A xhat = Norm::normalized(x[j], normalizer);
    x[j] = Norm::kCentered ? multiply_add(xhat, w[j], b[j]) : xhat * w[j];
  }
  return pack_from<T, N>(x);
}

// How the elements of a row are normalised; one thread of the row saves it for backward.
template <typename Norm, typename A>
__device__ __forceinline__ Normalizer<A> normalizer_of(const NormForwardArgs& args,
                                                       Moments<A> moments, A scale, A inverse_cols,
                                                       std::int64_t row, bool saves) {
  unscale(moments, scale);
  const Normalizer<A> normalizer =
      Norm::normalizer(moments, scale, inverse_cols, static_cast<A>(args.eps));
  if (args.stats != nullptr && saves) {
    Norm::save(normalizer, moments, static_cast<A*>(args.stats), row, args.rows);
  }
  return normalizer;
}

// Where the output of a row goes, and how a pack gets there.
template <typename Source>
__device__ __forceinline__ auto target_of(const NormForwardArgs& args, std::int64_t row) {
  using T = typename Source::Element;
  if constexpr (Source::kFlexible) {
    return AnyTarget<T>(args, row);
  } else {
    return static_cast<T*>(args.output.data) + row * args.cols;
  }
}
template <typename Access, typename T, int N, typename Col>
__device__ __forceinline__ void store_output(T* target, Col col, Col width,
                                             const Pack<T, N>& pack) {
  Access::store(target, col, width, pack);
}
template <typename, typename T, int N, typename Col>
__device__ __forceinline__ void store_output(const AnyTarget<T>& target, Col col, Col width,
                                             const Pack<T, N>& pack) {
  target.store(col, width, pack);
}

// A pack of a finished row, read again; not clipped. Of a stored sum, which others store beside, no
// element outside the row is read: the packs whose blocks might hold one are read by elements.
template <typename Access, int N, typename Source, typename Col>
__device__ __forceinline__ auto reload(const Source& source, Col col, Col width) {
  if constexpr (Source::kFlexible) {
    return source.template reload<N>(col, width);
  } else {
    const auto* const row = source.row();
    if constexpr (Access::kShifts && Source::kStoresRow) {
      if (col == 0 || col + 2 * N > width) {
        typename Source::Element values[N];
#pragma unroll
        for (int j = 0; j < N; ++j) {
          values[j] = col + j < width ? row[col + j] : typename Source::Element(0);
        }
        return as_pack(values);
      }
    }
    return Access::template load<N>(row, col, width);
  }
}

// Writes the output of a thread's vectors. Weight and bias are loaded kAhead vectors ahead, so that
// their latency is met once or twice a row; whole packs are stored one by one, since loads that
// come after a store stay behind it, and registers suffice. H200, bf16, with a load at each use,
// and with kAhead of 1 and 2, share of the copy limit: 0.957 0.974 0.980 at 131072x1024, 0.890
// 0.941 0.936 at 8192x16384; 1x1024 2.61, 2.42, 2.16 us. Two are too many where rows are streamed:
// 0.81 0.81 0.63 at 4096x32768.
template <int kLanes, typename Access, int kAhead, typename Affines, typename T, int N,
          int kVectors, typename A, typename Col, typename Target>
__device__ __forceinline__ void write_row(const NormForwardArgs& args, Affines (&affine)[kAhead],
                                          const Target& target, Col col, Col live_width,
                                          Pack<T, N> (&packs)[kVectors],
                                          const Normalizer<A>& normalizer) {
  const Col width = static_cast<Col>(args.cols);
  const auto col_of = [&](int i) { return col + i * kLanes * N; };
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    packs[i] = output_of(affine[i % kAhead], packs[i], normalizer);
    if constexpr (!Access::kSharesBlocks) {
      store_output<Access>(target, col_of(i), live_width, packs[i]);
    }
    if (i + kAhead < kVectors) {
      affine[i % kAhead] = {args, col_of(i + kAhead), width};
    }
  }
  if constexpr (Access::kSharesBlocks) {
    Access::template store_row<kLanes>(target, col, live_width, packs);
  }
}

// Where a thread stands.
struct RowPlace {
  std::int64_t row;
  int live_width;  // end, or 0 in threads past the last row: they shuffle along and store nothing
  int lane;
  int part;  // of the `parts` that the row's moments are merged of
  int parts;
  int first_col;
  int end;  // of the columns that the lanes may have
};

// For a warp in which a row's moments are not trusted(): takes those rows again from memory, one
// vector at a time.
template <typename W, typename Norm, typename Source, typename Access, typename Tile, typename A>
__device__ __forceinline__ void take_untrusted(const NormForwardArgs& args, const RowPlace& place,
                                               Moments<A> moments, CtaExchange<A> exchange) {
  using T = typename Source::Element;
  constexpr int N = Source::kElements;
  constexpr int kLanes = Tile::kLanes;
  const Source source(args, place.row);
  const int width = place.end;
  const A cols = static_cast<A>(args.cols);
  const auto col_of = [&](int i) { return place.first_col + i * kLanes * N; };
  const bool trust = trusted(moments, cols);
  A scale = 1;
  __syncwarp();  // the row may be the sum, which the lanes have written for each other
#pragma unroll 1
  for (int attempt = 0; attempt < 2; ++attempt) {
    const A next_scale = attempt == 0 ? A(1) : Limits<A>::kScale;
    WarpMoments<A> mine{};
#pragma unroll 1
    for (int i = 0; i < Tile::kVectors; ++i) {
      Pack<T, N> pack[1] = {reload<Access, N>(source, col_of(i), width)};
      if constexpr (!Source::kFlexible) {
        Access::clip(width - col_of(i), pack[0]);
      }
      const int in_row = min(max(width - (col_of(i) - place.lane * N), 0), kLanes * N);
      const A count = static_cast<A>(in_row);
      mine = append(mine, {count, group_moments<Norm, Access, kLanes>(pack, width - col_of(i),
                                                                      count, next_scale, true)});
    }
    Moments<A> refined = mine.moments;
    if (!Tile::kOneWarp && place.parts > 1) {
      exchange.barrier();  // read by all before it is written again
      if (place.live_width > 0) {
        exchange.put(place.part, mine);
      }
      exchange.barrier();
      refined =
          merge_parts<Norm::kCentered, kMaxCtaParts>(exchange.parts, place.parts, reciprocal(cols));
    }
    if (!trust && (attempt == 0 || overflowed(moments))) {
      moments = refined;
      scale = next_scale;
    }
  }
  const bool saves = place.live_width > 0 && place.lane == 0 && place.part == 0;
  const Normalizer<A> normalizer =
      normalizer_of<Norm>(args, moments, scale, reciprocal(cols), place.row, saves);
  const auto target = target_of<Source>(args, place.row);
#pragma unroll 1
  for (int i = 0; i < Tile::kVectors; ++i) {
    Pack<T, N> packs[1] = {reload<Access, N>(source, col_of(i), width)};
    Affine<W, Norm, N> affine[1] = {{args, col_of(i), width}};
    write_row<kLanes, Access>(args, affine, target, col_of(i), place.live_width, packs, normalizer);
  }
}

// The rest of norm_forward_kernel for such a warp: a function of its own that ends the kernel, so
// that the common path pays for it neither in registers nor in length.
template <typename W, typename Norm, typename Source, typename Access, typename Tile, typename A>
__device__ __noinline__ void finish_untrusted(const NormForwardArgs& args, const RowPlace& place,
                                              Moments<A> moments, CtaExchange<A> exchange) {
  take_untrusted<W, Norm, Source, Access, Tile>(args, place, moments, exchange);
}

// grid: enough CTAs for all rows; block: whole rows (one row if it takes more than one warp).
template <typename W, typename Norm, typename Source, typename Access, typename Tile>
__global__ void __launch_bounds__(ForwardBounds<W, Source, Access, Tile>::kThreads,
                                  ForwardBounds<W, Source, Access, Tile>::kCtasPerSm)
    norm_forward_kernel(const __grid_constant__ NormForwardArgs args) {
  using T = typename Source::Element;
  using A = Accumulator<T>;
  constexpr int N = Source::kElements;
  constexpr int kLanes = Tile::kLanes;
  constexpr int kVectors = Tile::kVectors;

  constexpr int kWarpCols = kVectors * kLanes * N;
  constexpr int kPartCols = kWarpCols * Tile::kSpread;
  const int width = static_cast<int>(args.cols);  // a row that fits into registers is short
  const bool one_warp = Tile::kSpread == 1 && (Tile::kOneWarp || width <= kWarpCols);
  const int lane = threadIdx.x % kLanes;
  int parts_of_row = 1;
  int warp = 0;
  std::int64_t my_row = blockIdx.x;
  if (one_warp) {
    my_row = static_cast<std::int64_t>(blockIdx.x) * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  } else {
    parts_of_row = (width + kPartCols - 1) / kPartCols;
    warp = threadIdx.x / kWarpSize;
  }
  __shared__ WarpMoments<A> parts[kMaxCtaParts];
  const CtaExchange<A> exchange{parts};
  // Threads past the last row: whole warps end, some lanes of one shuffle along and store nothing.
  if (!Tile::kOneWarp && my_row >= args.rows) {
    return;
  }
  const bool is_live = kIsFull<Access> || my_row < args.rows;
  const int live_width = is_live ? width : 0;
  const std::int64_t row = is_live ? my_row : args.rows - 1;

  const int first_col = (warp * kVectors * kLanes + lane) * N;
  const auto col_of = [&](int i) { return first_col + i * kLanes * N; };
  if constexpr (!Source::kFlexible && !Source::kSplit) {
    if (blockIdx.x < kPrefetchingCtas) {
      prefetch_row<kVectors>(row_of<T>(args.input, row), first_col, kLanes * N, width);
      if constexpr (Source::kStoresRow) {
        prefetch_row<kVectors>(row_of<T>(args.residual, row), first_col, kLanes * N, width);
      }
    }
  }
  await_kernels_before();
  const Source source(args, row);
  Pack<T, N> packs[kVectors];
  typename Source::template Fetched<N> fetched[kVectors];
  // Not with few rows, which are over too soon, and not where it would spill.
  constexpr bool kManyRegisters =
      (Tile::kTight && Norm::kCentered) || (Source::kGradStreams == 3 && sizeof(W) > sizeof(T));
  constexpr bool kKept = std::is_same_v<Access, VectorAccess> && !Tile::kEager && !kManyRegisters;
  using RowAccess = std::conditional_t<kKept, KeptAccess, Access>;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    fetched[i] = source.template fetch<RowAccess, N>(col_of(i), width);
  }
  source.template finish<Access, kLanes>(fetched, packs, first_col, live_width);

  constexpr bool kOneAhead = kVectors < 3 || Tile::kTight || std::is_same_v<Tile, LongTile>;
  constexpr int kAhead = Tile::kEager ? kVectors : kOneAhead ? 1 : 2;
  Affine<W, Norm, N, Access> affine[kAhead];
  const auto load_affine = [&] {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      affine[i] = {args, col_of(i), width};
    }
  };
  if constexpr (Tile::kEager) {
    load_affine();
  }
  const A cols = static_cast<A>(width);
  const A inverse_cols = reciprocal(cols);
  const int part = warp / Tile::kSpread;
  const bool leads = warp % Tile::kSpread == 0;
  const int elements =
      kIsFull<Access> ? kPartCols : max(min(width - part * kPartCols, kPartCols), 0);
  const A count = static_cast<A>(elements);
  __shared__ A totals[2][Tile::kSpread > 1 ? kMaxSpreadThreads : 1];
  int buffer = 0;
  const auto spread = [&](A total) {
    if constexpr (Tile::kSpread > 1) {  // two buffers in turn: one barrier a sum is enough
      A* const mine = totals[buffer];
      buffer ^= 1;
      mine[threadIdx.x] = total;
      row_barrier(part, Tile::kSpread * kLanes);
      total = 0;
#pragma unroll
      for (int i = 0; i < Tile::kSpread; ++i) {
        total += mine[(part * Tile::kSpread + i) * kLanes + lane];
      }
    }
    return total;
  };
  Moments<A> moments = group_moments<Norm, Access, kLanes, kVectors, N, T>(
      packs, width - first_col, count, A(1), false, spread);
  // Weight and bias are on their way while the warps exchange their moments, where registers last
  // for it. H200, LayerNorm, bf16, us after that and before: 133.8 131.2 at 8192x16384, 127.1 125.7
  // at 16384x8192; but with three vectors 4.30 4.38 at 4096x768.
  constexpr bool kEarly = kIsFull<Access> && !Tile::kEager && kVectors != 3;
  if constexpr (kEarly) {
    load_affine();
  }
  if (parts_of_row > 1) {
    if (leads) {
      exchange.put(part, {count, moments});
    }
    exchange.barrier();
    moments = merge_parts<Norm::kCentered, kMaxCtaParts>(parts, parts_of_row, inverse_cols);
  }
  // The same decision in every thread of a row; rows that share a warp go together.
  if (!__all_sync(kAllLanes, trusted(moments, cols))) {
    // Spread warps but the leading one do the work along with it, and store nothing.
    using Whole = RowTile<kLanes, kVectors * Tile::kSpread>;
    const int part_col = first_col - warp % Tile::kSpread * kWarpCols;
    const RowPlace place{row, leads ? live_width : 0, lane, part, parts_of_row, part_col, width};
    using Again = std::conditional_t<kIsFull<Access>, VectorAccess, Access>;
    finish_untrusted<W, Norm, Source, Again, Whole>(args, place, moments, exchange);
    return;
  }
  const Normalizer<A> normalizer = normalizer_of<Norm>(args, moments, A(1), inverse_cols, row,
                                                       is_live && lane == 0 && warp == 0);
  if constexpr (!kEarly && !Tile::kEager) {
    load_affine();
  }
  const auto target = target_of<Source>(args, row);
  write_row<kLanes, Access>(args, affine, target, first_col, live_width, packs, normalizer);
}

}  // namespace fused_op::cuda
