// Forward of rows of any length on any GPU. A CTA reads its row twice, once for the moments and
// once to normalise it. What the second pass reads is the row itself: the input, or the sum that
// the first pass stored. For rows that no cluster holds, and GPUs without clusters. Compiled by
// nvcc and by NVRTC; torch-free.
#pragma once

#include "cuda/long_rows.cuh"

namespace fused_op::cuda {

// Puts the moments of the warps' parts into their slots. Warp w has parts w, w + warps and so on.
template <typename Op, typename Tile, typename A>
__device__ __forceinline__ void read_row(const typename Op::Source& source, std::int64_t width,
                                         std::int64_t parts, const CtaExchange<A>& exchange) {
  using Access = typename Op::Access;
  constexpr int N = Tile::kPack;
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
#pragma unroll 1
  for (std::int64_t part = threadIdx.x / kWarpSize; part < parts; part += warps) {
    const auto lane = lane_of_part<Tile, true>(part, width);
    typename Op::Source::template Loaded<N, Tile::kVectors> loaded;
    Pack<typename Op::Source::Row, N> packs[Tile::kVectors];
    source.template load<Access>(lane, loaded);
    source.template finish<Access>(lane, loaded, packs);
    const std::int64_t left = width - part * Tile::kPartCols;
    const int count = left < Tile::kPartCols ? static_cast<int>(left) : Tile::kPartCols;
    WarpMoments<A> mine = moments_of_part<Op, Tile, A>(lane, packs, count);
    const int slot = static_cast<int>(part % kMaxSlots);
    if (part >= kMaxSlots) {  // this warp filled the slot before
      __syncwarp();
      mine = append(exchange.parts[slot], mine);
    }
    __syncwarp();
    exchange.put(slot, mine);
  }
}

// grid: one CTA a row; block: Tile::kThreads.
template <typename Op, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    forward_streamed_kernel(const __grid_constant__ typename Op::Args args) {
  using Norm = typename Op::Norm;
  using Access = typename Op::Access;
  using Epilogue = typename Op::Epilogue;
  using Row = typename Op::Source::Row;
  using A = Accumulator<Row>;
  constexpr int N = Tile::kPack;
  static_assert(kMaxSlots % (Tile::kThreads / kWarpSize) == 0, "a slot is one warp's");

  const std::int64_t row = blockIdx.x;
  const std::int64_t width = args.cols;
  const std::int64_t parts = (width + Tile::kPartCols - 1) / Tile::kPartCols;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  __shared__ WarpMoments<A> slots[kMaxSlots];
  const CtaExchange<A> exchange{slots};
  await_kernels_before();
  const typename Op::Source source(args, row);
  read_row<Op, Tile>(source, width, parts, exchange);
  exchange.barrier();
  const Moments<A> moments = merge_slots<Norm, Tile>(slots, width);
  const bool saves = threadIdx.x == 0;
  if (!trusted(moments, static_cast<A>(width))) {
    finish_untrusted_long<Op, Tile, A>(args, row, warp, parts, warps, saves, exchange);
    return;
  }
  const Normalizer<A> normalizer =
      normalizer_of<Norm>(args, moments, A(1), reciprocal(static_cast<A>(width)), row, saves);
#pragma unroll 1
  for (std::int64_t part = warp; part < parts; part += warps) {
    const auto lane = lane_of_part<Tile, false>(part, width);
    Pack<Row, N> packs[Tile::kVectors];
    typename Epilogue::template Beside<N, Tile::kVectors> beside;
    source.template read<Access>(lane, packs);
    Epilogue::template load_beside<Access>(args, row, lane, beside);
    typename Epilogue::template Parameters<N> parameters[Tile::kAhead];
    load_parameters<Op, Tile>(args, row, lane, parameters);
    write_row<Op, Tile>(args, row, lane, parameters, beside, packs, normalizer);
  }
}

}  // namespace fused_op::cuda
