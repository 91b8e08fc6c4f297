// What the forward kernels for long rows share. A row too long for the registers of a CTA is split
// into parts, which warps take. The moments of the parts are exchanged once and merged in order.
// The parts depend only on the element types and the row's length, so all of these kernels give a
// row the same bits. Compiled by nvcc and by NVRTC; torch-free.
#pragma once

#include "core/epilogue.h"
#include "core/norm_args.h"
#include "core/norm_math.h"
#include "core/source.h"
#include "cuda/access.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/forward_layout.h"
#include "cuda/forward_rows.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/words.cuh"

namespace fused_op::cuda {

// A part is kVectors packs of kPack elements in each lane of a warp, neighbouring lanes' packs side
// by side. A warp has kParts neighbouring parts at a time.
template <int kPack_, int kVectors_, int kParts_, int kAhead_, int kThreads_, int kCtasPerSm_,
          int kRowParts_>
struct LongTile {
  static constexpr int kPack = kPack_;
  static constexpr int kVectors = kVectors_;
  static constexpr int kParts = kParts_;
  static constexpr int kAhead = kAhead_;      // packs of parameters in flight; in turn: rows
  static constexpr int kThreads = kThreads_;  // of a CTA, at most
  static constexpr int kCtasPerSm = kCtasPerSm_;
  static constexpr bool kOneWarp = false;  // a row has several

  static constexpr int kStep = kWarpSize * kPack;
  static constexpr int kPartCols = kStep * kVectors;
  static constexpr int kPacks = kVectors * kParts;  // of a lane

  // Parts of a row, if each warp has kParts of them and all are whole; 0: known at run time.
  static constexpr int kRowParts = kRowParts_;
  static constexpr int kSure = kRowParts > 0 ? kPacks : 0;  // packs inside the row
  __device__ __forceinline__ static std::int64_t width(std::int64_t cols) {
    return kRowParts > 0 ? kRowParts * kPartCols : cols;
  }
  // Elements of a part; 0 or less: there is no such part.
  __device__ __forceinline__ static int part_width(int part, int width) {
    return kRowParts > 0 ? kPartCols : min(width - part * kPartCols, kPartCols);
  }
};

// The packs of one lane, in a row of any length: like Lane of access.cuh.
template <int kStep_, bool kKeep_>
struct LongLane {
  static constexpr int kLanes = kWarpSize;
  static constexpr int kStep = kStep_;
  static constexpr int kSure = 0;
  static constexpr bool kKeep = kKeep_;

  std::int64_t first;
  std::int64_t width;
  bool live = true;

  __device__ __forceinline__ std::int64_t col(int i) const { return first + i * kStep; }
  template <int N>
  __device__ __forceinline__ int valid(int i) const {
    const std::int64_t left = width - col(i);
    return left >= N ? N : left < 0 ? -1 : static_cast<int>(left);
  }
};

template <typename Tile, bool kKeep>
__device__ __forceinline__ LongLane<Tile::kStep, kKeep> lane_of_part(std::int64_t part,
                                                                     std::int64_t width) {
  const int lane = static_cast<int>(threadIdx.x % kWarpSize);
  return {part * Tile::kPartCols + lane * Tile::kPack, width};
}

// Calls add(x - from, terms) for a lane's elements of a part and adds the terms to the totals, in
// one short chain of sums for each pack. packs[i] is pack i.
template <bool kWhole, int N, int kVectors, typename Lane, typename Packs, typename A, int kTerms,
          typename Add>
__device__ __forceinline__ void add_deviations(const Lane& lane, const Packs& packs, A from,
                                               A (&totals)[kTerms], Add&& add) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    A x[N];
    A terms[kTerms] = {};
    to_values(packs[i], x);
    const int valid = lane.template valid<N>(i);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      add(kWhole || valid > j ? x[j] - from : A(0), terms);
    }
#pragma unroll
    for (int k = 0; k < kTerms; ++k) {
      totals[k] += valid > 0 ? terms[k] : A(0);
    }
  }
}

// The moments of a part with `count` elements, valid in every lane of the warp that has it. Its
// elements are seen once, as deviations from one of them: few warps are on an SM, and a second pass
// would wait for the first.
template <typename Op, typename Tile, typename A, typename Lane, typename Packs>
__device__ __forceinline__ WarpMoments<A> moments_of_part(const Lane& lane, const Packs& packs,
                                                          int count) {
  using Norm = typename Op::Norm;
  using Row = typename Op::Source::Row;
  constexpr int N = Tile::kPack;
  WarpMoments<A> part{static_cast<A>(count), {}};
  if constexpr (!Norm::kCentered) {  // packs and elements past the row's end are zero
    A second[1] = {};
    add_deviations<true, N, Tile::kVectors>(
        lane, packs, A(0), second, [](A x, A(&to)[1]) { to[0] = multiply_add(x, x, to[0]); });
    lane_sums<kWarpSize>(second);
    part.moments.second = second[0];
  } else {
    const auto take = [&](A pivot) {
      A sums[2] = {};
      add_deviations<Op::Access::kWhole, N, Tile::kVectors>(
          lane, packs, pivot, sums, [](A deviation, A(&to)[2]) {
            to[0] += deviation;
            to[1] = multiply_add(deviation, deviation, to[1]);
          });
      lane_sums<kWarpSize>(sums);
      return moments_of(sums, pivot, reciprocal(part.count), part.moments);
    };
    A first[N];
    to_values(packs[0], first);
    if (!take(__shfl_sync(kAllLanes, first[0], 0))) {
      take(part.moments.mean);
    }
    if constexpr (sizeof(Row) < 4) {  // means of 16-bit elements need no correction below rounding
      part.moments.rest = 0;
    }
  }
  return part;
}

// The moments of a row from those of its parts; valid in every lane.
template <typename Norm, typename Tile, typename A>
__device__ __forceinline__ Moments<A> merge_slots(const WarpMoments<A>* slots, std::int64_t width) {
  const std::int64_t parts = (Tile::width(width) + Tile::kPartCols - 1) / Tile::kPartCols;
  const int count = parts < kMaxSlots ? static_cast<int>(parts) : kMaxSlots;
  return merge_parts<Norm::kCentered, kMaxSlots>(slots, count, reciprocal(static_cast<A>(width)));
}

// Loads the parameters of a lane's first packs.
template <typename Op, typename Tile, typename Lane, typename Parameters, int kCount>
__device__ __forceinline__ void load_parameters(const typename Op::Args& args, std::int64_t row,
                                                const Lane& lane,
                                                Parameters (&parameters)[kCount]) {
  constexpr int N = Tile::kPack;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    parameters[i] = Op::Epilogue::template load<typename Op::Norm, typename Op::Access, N>(
        args, row, lane.col(i), lane.template valid<N>(i));
  }
}

// The parts of a warp, and how the moments of parts are exchanged: put(slot, moments) and
// barrier(), after which parts[slot] is the same in all threads of the row.
template <typename Exchange>
struct PartsOfWarp {
  std::int64_t begin;
  std::int64_t end;
  int step;
  Exchange exchange;
};

// Computes the moments of a row again, one pack of each lane at a time: slow, and rare.
template <typename Op, typename Tile, typename A, typename Exchange>
struct LongRescue {
  using Norm = typename Op::Norm;
  using Row = typename Op::Source::Row;
  using OnePack = LongLane<0, false>;
  static constexpr int N = Tile::kPack;

  const typename Op::Args& args;
  std::int64_t row;
  const PartsOfWarp<Exchange>& parts;

  __device__ OnePack lane_of(std::int64_t part, int i) const {
    const int lane = static_cast<int>(threadIdx.x % kWarpSize);
    return {part * Tile::kPartCols + i * Tile::kStep + lane * N, args.cols};
  }
  __device__ void read(const OnePack& lane, Pack<Row, N> (&pack)[1]) const {
    const typename Op::Source source(args, row);
    source.template read<LoneWords>(lane, pack);
  }
  // The moments of one pack of each lane, of elements times `scale`, with a refined mean.
  __device__ WarpMoments<A> moments_of_pack(std::int64_t part, int i, A scale) const {
    const OnePack lane = lane_of(part, i);
    Pack<Row, N> pack[1];
    read(lane, pack);
    const std::int64_t left = args.cols - part * Tile::kPartCols - i * Tile::kStep;
    const A count = static_cast<A>(left > Tile::kStep ? Tile::kStep : left < 0 ? 0 : left);
    return {count, moments_of_lanes<Norm, false, kWarpSize>(lane, pack, count, scale, true)};
  }
  __device__ Moments<A> moments(A scale) const {
    const Exchange& exchange = parts.exchange;
    exchange.barrier();  // all have read before it is written again
#pragma unroll 1
    for (std::int64_t part = parts.begin; part < parts.end; part += parts.step) {
      const int slot = static_cast<int>(part % kMaxSlots);
      WarpMoments<A> mine = part < kMaxSlots ? WarpMoments<A>{} : exchange.parts[slot];
      __syncwarp();
#pragma unroll 1
      for (int i = 0; i < Tile::kVectors; ++i) {
        mine = append(mine, moments_of_pack(part, i, scale));
      }
      exchange.put(slot, mine);
    }
    exchange.barrier();
    return merge_slots<Norm, Tile>(exchange.parts, args.cols);
  }
  __device__ void write(const Normalizer<A>& normalizer) const {
    using Epilogue = typename Op::Epilogue;
    using Y = typename Epilogue::Output;
    Y* const output = static_cast<Y*>(args.output.data) + row * args.cols;
#pragma unroll 1
    for (std::int64_t part = parts.begin; part < parts.end; part += parts.step) {
#pragma unroll 1
      for (int i = 0; i < Tile::kVectors; ++i) {
        const OnePack lane = lane_of(part, i);
        Pack<Row, N> pack[1];
        read(lane, pack);
        A values[N];
        to_values(pack[0], values);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          values[j] = Norm::normalized(values[j], normalizer);
        }
        Epilogue epilogue(args, row, lane);
        tell(epilogue, normalizer);
        const auto parameters = Epilogue::template load<Norm, typename Op::Access, N>(
            args, row, lane.first, lane.width - lane.first);
        typename Epilogue::template Beside<N, 1> beside;
        Epilogue::template load_beside<Words>(args, row, lane, beside);
        epilogue.template apply<Norm>(parameters, beside, 0, values);
        const Pack<Y, N> packs[1] = {rounded<Y>(values)};
        Words::store(lane, output, packs);
      }
    }
  }
};

// Finishes a row whose moments are not trusted(). All threads of the row call it. It is a function
// of its own so that the common path pays neither registers nor length for it.
template <typename Op, typename Tile, typename A, typename Exchange>
__device__ __noinline__ void finish_untrusted_long(const typename Op::Args& args, std::int64_t row,
                                                   std::int64_t begin, std::int64_t end, int step,
                                                   bool saves, Exchange exchange) {
  const PartsOfWarp<Exchange> parts{begin, end, step, exchange};
  const LongRescue<Op, Tile, A, Exchange> rescue{args, row, parts};
  A scale = 1;
  Moments<A> moments = rescue.moments(scale);
  if (overflowed(moments)) {
    scale = Limits<A>::kScale;
    moments = rescue.moments(scale);
  }
  rescue.write(normalizer_of<typename Op::Norm>(args, moments, scale,
                                                reciprocal(static_cast<A>(args.cols)), row, saves));
}

}  // namespace fused_op::cuda
