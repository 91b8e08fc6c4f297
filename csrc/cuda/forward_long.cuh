// The forward of rows too long for the registers of a CTA: its warps take parts of a row in turn,
// and exchange the parts' moments once. On sm_90 the CTAs of a cluster share a row and keep it in
// shared memory meanwhile; the longest rows, and all of them before sm_90, are read again. Both
// give the same bits. Rows that need no work before they are summed: forward_parts.cuh and
// forward_pipelined.cuh.
// Included by launch_*.cu only; torch-free.
#pragma once

#include "core/norm_args.h"
#include "core/row_source.h"
#include "cuda/cluster_exchange.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/forward.cuh"
#include "cuda/row_access.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/row_tile.h"

namespace fused_op::cuda {

// A warp's part of a row: kPartVectors vectors, of which lane i has every 32nd. Col counts columns.
template <typename Source, typename Col>
struct PartOf {
  static constexpr int N = Source::kElements;
  static constexpr int kVectors = kPartVectors / kWarpSize;
  static constexpr int kCols = kPartVectors * N;

  // Parts of a row of this many columns.
  __device__ __forceinline__ static Col count(Col width) { return (width + kCols - 1) / kCols; }
  // The first column of this thread's vector i.
  __device__ __forceinline__ static Col col(Col part, int i) {
    const int lane = threadIdx.x % kWarpSize;
    return part * kCols + (i * kWarpSize + lane) * N;
  }
};

// packs[i] is this thread's vector i of the part. Its elements are seen once: few warps are on a
// multiprocessor, and wait for each other. H200, bf16, LayerNorm, with two passes and two sums in
// merge_parts, and so: 0.80 0.84 of the limit at 1024x131072, 4.5 4.3 us at 1x262144.
template <typename Norm, typename Access, typename Source, typename A, typename Packs, typename Col>
__device__ __forceinline__ WarpMoments<A> part_moments(const Packs& packs, Col part, Col width) {
  using T = typename Source::Element;
  using Part = PartOf<Source, Col>;
  constexpr int N = Source::kElements;
  const int in_row = kIsFull<Access> ? static_cast<int>(Part::kCols)
                                     : valid_elements(part * Part::kCols, width, Part::kCols);
  const int left = in_row - static_cast<int>(threadIdx.x % kWarpSize) * N;
  const A count = static_cast<A>(in_row);
  const auto add = [&](A from, auto& totals, auto&& add_terms) {
    add_deviations<Access, kWarpSize, Part::kVectors, N>(packs, left, A(1), from, totals,
                                                         add_terms);
    lane_sums<kWarpSize>(totals);
  };
  Moments<A> moments{};
  if constexpr (!Norm::kCentered) {
    A second[1] = {};
    add(A(0), second, [](A x, A(&to)[1]) { to[0] = multiply_add(x, x, to[0]); });
    moments.second = second[0];
  } else {
    const A inverse_count = count > A(0) ? reciprocal(count) : A(0);
    const auto take = [&](A pivot) {
      A sums[2] = {};
      add(pivot, sums, [](A deviation, A(&to)[2]) {
        to[0] += deviation;
        to[1] = multiply_add(deviation, deviation, to[1]);
      });
      return moments_of(sums, pivot, inverse_count, moments);
    };
    A first[N];
    unpack(packs[0], first);
    if (!take(__shfl_sync(kAllLanes, first[0], 0))) {
      take(moments.mean);
    }
    if constexpr (sizeof(T) < 4) {  // means of 16-bit elements need no correction below rounding
      moments.rest = 0;
    }
  }
  return {count, moments};
}

// The moments of a row from those of its parts.
template <typename Norm, typename Source, typename A, typename Col>
__device__ __forceinline__ Moments<A> long_moments(const WarpMoments<A>* parts, Col width) {
  const Col slots = min(PartOf<Source, Col>::count(width), Col{kMaxParts});
  return merge_parts<Norm::kCentered, kMaxParts>(parts, static_cast<int>(slots),
                                                 reciprocal(static_cast<A>(width)));
}

// The rest for a row whose moments are not trusted(): takes it again from memory, one vector at a
// time. A function of its own that ends the kernel, so that the common path pays for it neither in
// registers nor in length. The parts of this warp: from the first one on, as many apart as the CTA
// has warps.
template <typename W, typename Norm, typename Source, typename Access, typename A, typename Col,
          typename Exchange>
__device__ __noinline__ void finish_untrusted_long(const NormForwardArgs& args, std::int64_t row,
                                                   Col first_part, Col last_part, bool saves,
                                                   Exchange exchange) {
  using T = typename Source::Element;
  using Part = PartOf<Source, Col>;
  constexpr int N = Source::kElements;
  constexpr int kVectorCols = kWarpSize * N;
  const Source source(args, row);
  const int lane = threadIdx.x % kWarpSize;
  const int warps = blockDim.x / kWarpSize;
  const Col width = static_cast<Col>(args.cols);
  A scale = 1;
  Moments<A> moments{};
#pragma unroll 1
  for (int attempt = 0; attempt < 2 && (attempt == 0 || overflowed(moments)); ++attempt) {
    scale = attempt == 0 ? A(1) : Limits<A>::kScale;
    exchange.barrier();  // read by all before it is written again
#pragma unroll 1
    for (Col part = first_part; part < last_part; part += warps) {
      const int slot = static_cast<int>(part % kMaxParts);
      WarpMoments<A> mine = part < kMaxParts ? WarpMoments<A>{} : exchange.parts[slot];
      __syncwarp();
#pragma unroll 1
      for (int i = 0; i < Part::kVectors; ++i) {
        Pack<T, N> pack[1] = {reload<Access, N>(source, Part::col(part, i), width)};
        if constexpr (!Source::kFlexible) {
          Access::clip(width - Part::col(part, i), pack[0]);
        }
        const int in_row = valid_elements(part * Part::kCols + i * kVectorCols, width, kVectorCols);
        const A count = static_cast<A>(in_row);
        mine = append(mine, {count, group_moments<Norm, Access, kWarpSize>(pack, in_row - lane * N,
                                                                           count, scale, true)});
      }
      exchange.put(slot, mine);
    }
    exchange.barrier();
    moments = long_moments<Norm, Source>(exchange.parts, width);
  }
  const Normalizer<A> normalizer =
      normalizer_of<Norm>(args, moments, scale, reciprocal(static_cast<A>(width)), row, saves);
  const auto target = target_of<Source>(args, row);
#pragma unroll 1
  for (Col part = first_part; part < last_part; part += warps) {
#pragma unroll 1
    for (int i = 0; i < Part::kVectors; ++i) {
      const Col col = Part::col(part, i);
      Pack<T, N> packs[1] = {reload<Access, N>(source, col, width)};
      Affine<W, Norm, N> affine[1] = {{args, col, width}};
      write_row<kWarpSize, Access>(args, affine, target, col, width, packs, normalizer);
    }
  }
}

// One CTA a row. Dynamic shared memory: the moments of the row's parts.
template <typename W, typename Norm, typename Source, typename Access>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    norm_forward_streamed_kernel(const __grid_constant__ NormForwardArgs args) {
  using T = typename Source::Element;
  using A = Accumulator<T>;
  using Part = PartOf<Source, std::int64_t>;
  constexpr int N = Source::kElements;
  constexpr int kVectors = Part::kVectors;

  const int warp = threadIdx.x / kWarpSize;
  const std::int64_t row = blockIdx.x;
  await_kernels_before();
  const Source source(args, row);
  const std::int64_t row_parts = Part::count(args.cols);
  extern __shared__ uint4 shared[];
  const CtaExchange<A> exchange{reinterpret_cast<WarpMoments<A>*>(shared)};
  for (std::int64_t part = warp; part < row_parts; part += kMaxCtaParts) {
    Pack<T, N> packs[kVectors];
    typename Source::template Fetched<N> fetched[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      fetched[i] = source.template fetch<Access, N>(Part::col(part, i), args.cols);
    }
    source.template finish<Access, kWarpSize>(fetched, packs, Part::col(part, 0), args.cols);
    auto mine = part_moments<Norm, Access, Source, A>(packs, part, args.cols);
    const int slot = static_cast<int>(part % kMaxParts);
    if (part >= kMaxParts) {  // this warp filled the slot before
      __syncwarp();
      mine = append(exchange.parts[slot], mine);
    }
    __syncwarp();
    exchange.put(slot, mine);
  }
  exchange.barrier();
  const std::int64_t first_part = warp;
  const Moments<A> moments = long_moments<Norm, Source>(exchange.parts, args.cols);
  const bool saves = threadIdx.x == 0;
  if (!trusted(moments, static_cast<A>(args.cols))) {
    finish_untrusted_long<W, Norm, Source, Access, A>(args, row, first_part, row_parts, saves,
                                                      exchange);
    return;
  }
  const Normalizer<A> normalizer =
      normalizer_of<Norm>(args, moments, A(1), reciprocal(static_cast<A>(args.cols)), row, saves);
  const auto target = target_of<Source>(args, row);
  for (std::int64_t part = warp; part < row_parts; part += kMaxCtaParts) {
    Affine<W, Norm, N> affine[1] = {{args, Part::col(part, 0), args.cols}};
    Pack<T, N> packs[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      packs[i] = reload<Access, N>(source, Part::col(part, i), args.cols);
    }
    write_row<kWarpSize, Access>(args, affine, target, Part::col(part, 0), args.cols, packs,
                                 normalizer);
  }
}

// A thread's vectors of a part in shared memory: read when they are wanted, which leaves registers
// for more CTAs.
template <typename T, int N>
struct HeldVectors {
  std::uint32_t first;  // address in shared memory

  __device__ __forceinline__ Pack<T, N> operator[](int i) const {
    Pack<T, N> pack;
    load_shared(first + i * kWarpSize * kVectorBytes, pack.words);
    return pack;
  }
  __device__ __forceinline__ void put(int i, const Pack<T, N>& pack) const {
    store_shared(first + i * kWarpSize * kVectorBytes, pack.words);
  }
};

// A cluster a row. Dynamic shared memory: the moments of the row's parts, then this CTA's share of
// the row, cta_parts of its parts.
template <typename W, typename Norm, typename Source, typename Access>
__global__ void __launch_bounds__(kClusterWarps* kWarpSize, 2)
    norm_forward_cluster_kernel(const __grid_constant__ NormForwardArgs args, int cta_parts) {
#if __CUDA_ARCH__ >= 900  // never launched before
  using T = typename Source::Element;
  using A = Accumulator<T>;
  using Part = PartOf<Source, int>;
  constexpr int N = Source::kElements;
  constexpr int kVectors = Part::kVectors;

  const int lane = threadIdx.x % kWarpSize;
  const int warps = blockDim.x / kWarpSize;
  const int width = static_cast<int>(args.cols);
  const int row_parts = Part::count(width);
  const int cta_begin = static_cast<int>(cluster_rank()) * cta_parts;
  const int cta_end = min(cta_begin + cta_parts, row_parts);
  const int first_part = cta_begin + threadIdx.x / kWarpSize;
  const std::int64_t row = cluster_id();

  __shared__ std::uint64_t arrivals;
  extern __shared__ uint4 shared[];
  auto* const parts = reinterpret_cast<WarpMoments<A>*>(shared);
  static_assert(sizeof(WarpMoments<A>) % kVectorBytes == 0);
  static_assert(kMaxForwardVectors >= kClusterParts * kPartVectors);  // so no cluster is one CTA
  const std::uint32_t held = shared_address(parts + row_parts) + lane * kVectorBytes;
  const auto held_at = [&](int part, int i) {
    return held + ((part - cta_begin) * kVectors + i) * kWarpSize * kVectorBytes;
  };
  const auto ctas = static_cast<int>(cluster_size());
  const ClusterExchange<WarpMoments<A>, 1> exchange{parts, &arrivals, row_parts, ctas, 1};
  exchange.begin();
  await_kernels_before();
  const Source source(args, row);
  exchange.ready();
#pragma unroll 1
  for (int part = first_part; part < cta_end; part += warps) {
    const HeldVectors<T, N> vectors{held_at(part, 0)};
    Pack<T, N> packs[kVectors];
    typename Source::template Fetched<N> fetched[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      fetched[i] = source.template fetch<Access, N>(Part::col(part, i), width);
    }
    source.template finish<Access, kWarpSize>(fetched, packs, Part::col(part, 0), width);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      vectors.put(i, packs[i]);
    }
    exchange.send(0, part, part_moments<Norm, Access, Source, A>(packs, part, width));
  }
  // Parameters of the first vectors while the moments are on their way. H200, bf16, RmsNorm of
  // plain rows, which this kernel took before forward_pipelined.cuh did, share of the limit with
  // none, two and four: 0.86 0.90 0.89 at 2048x65536, 0.82 0.89 0.87 at 1024x131072.
  constexpr int kAhead = 2;
  Affine<W, Norm, N> affine[kAhead];
  const auto load_affine = [&](int part) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      affine[i] = {args, Part::col(part, i), width};
    }
  };
  load_affine(first_part);
  exchange.await(0);
  const Moments<A> moments = long_moments<Norm, Source>(parts, width);
  const bool saves = cta_begin == 0 && threadIdx.x == 0;
  if (!trusted(moments, static_cast<A>(args.cols))) {  // in the whole cluster
    finish_untrusted_long<W, Norm, Source, Access, A>(args, row, first_part, cta_end, saves,
                                                      ClusterParts<A>{parts, ctas});
    return;
  }
  const Normalizer<A> normalizer =
      normalizer_of<Norm>(args, moments, A(1), reciprocal(static_cast<A>(args.cols)), row, saves);
  const auto target = target_of<Source>(args, row);
#pragma unroll 1
  for (int part = first_part; part < cta_end; part += warps) {
    const HeldVectors<T, N> vectors{held_at(part, 0)};
    if constexpr (Access::kSharesBlocks) {
      Pack<T, N> packs[kVectors];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        packs[i] = vectors[i];
      }
      write_row<kWarpSize, Access>(args, affine, target, Part::col(part, 0), width, packs,
                                   normalizer);
    } else {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const Pack<T, N> pack = output_of(affine[i % kAhead], vectors[i], normalizer);
        Access::store(target, Part::col(part, i), width, pack);
        if (i + kAhead < kVectors) {
          affine[i % kAhead] = {args, Part::col(part, i + kAhead), width};
        }
      }
    }
    load_affine(part + warps);
  }
#endif
}

}  // namespace fused_op::cuda
