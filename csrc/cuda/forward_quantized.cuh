// A forward whose rows end in 8 bits: forward_kernel of forward_rows.cuh with a different end. The
// rounded row is in registers; its largest magnitude, or that of every 128 columns, takes one more
// reduction. Maxima are exact in any order. Compiled by nvcc and by NVRTC; torch-free.
#pragma once

#include "cuda/forward_rows.cuh"
#include "cuda/quantize_pack.cuh"

namespace fused_op::cuda {

// A row whose rounded packs a lane holds.
template <typename As, typename Tile, typename Lane, typename Y>
struct QuantizedRow {
  static constexpr int N = Tile::kPack;
  static constexpr int kVectors = Tile::kVectors;
  // How many packs of a lane, and how many neighbouring lanes, a block spans.
  static constexpr int kBlockPacks = Tile::kStep < kBlockCols ? kBlockCols / Tile::kStep : 1;
  static constexpr int kBlockLanes = Tile::kStep < kBlockCols ? Tile::kLanes : kBlockCols / N;
  static_assert(kWarpSize * N % kBlockCols == 0, "no block is in two warps");

  const Quantization& to;
  const ForwardPlace& place;
  const Lane& lane;
  const Pack<Y, N> (&packs)[kVectors];

  __device__ __forceinline__ bool has(int i) const { return lane.template valid<N>(i) > 0; }
  __device__ __forceinline__ std::uint32_t largest(int begin, int end) const {
    std::uint32_t most = 0;
#pragma unroll
    for (int i = begin; i < end; ++i) {
      const std::uint32_t with = largest_of_pack(packs[i], most);
      most = has(i) ? with : most;
    }
    return most;
  }
  __device__ __forceinline__ void store(int i, const Scaler& scaler) const {
    Byte* const row = static_cast<Byte*>(to.quantized) + place.row * lane.width;
    Vectors::store_pack(lane, row, i, quantized_pack<As>(packs[i], scaler));
  }
  __device__ __forceinline__ Scale scale_from(float largest) const {
    return scale_of(largest, As::rule(), DTypeOf<Y>::kValue);
  }

  // All threads of the row call this.
  __device__ __forceinline__ float largest_of_row() const {
    float most = largest_of_lanes<Y, Tile::kLanes>(largest(0, kVectors));
    if (!Tile::kOneWarp && place.warps > 1) {
      __shared__ std::uint32_t of_warps[kMaxRowWarps];
      if (place.lane == 0) {
        of_warps[place.warp] = __float_as_uint(most);
      }
      __syncthreads();
      const std::uint32_t mine = place.lane < place.warps ? of_warps[place.lane] : 0;
      most = largest_of_lanes<float, kWarpSize>(mine);
    }
    return most;
  }
  __device__ __forceinline__ void store_all(const Scale& scale) const {
    const Scaler scaler = scaler_of(scale);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      store(i, scaler);
    }
  }
  // Of the lanes that share blocks, the first computes the scale of their first block, the second
  // that of the second one and so on: a scale takes two divisions. Share of copy if every lane
  // computes all of them, and so: 0.83 0.91 at 131072x1024, 0.78 0.89 at 16384x8192 (H200, bf16).
  __device__ __forceinline__ void store_blocks() const {
    constexpr int kBlocks = (kVectors + kBlockPacks - 1) / kBlockPacks;
    static_assert(kBlocks <= kBlockLanes, "a lane computes one scale");
    const int mine = place.lane % kBlockLanes;
    float largest_of_mine = 0;
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
      const int end = min((k + 1) * kBlockPacks, kVectors);
      const float of_block = largest_of_lanes<Y, kBlockLanes>(largest(k * kBlockPacks, end));
      largest_of_mine = k == mine ? of_block : largest_of_mine;
    }
    const Scale scale = scale_from(largest_of_mine);
    const int first = lane.first - mine * N + mine * kBlockPacks * Tile::kStep;  // of its block
    if (place.live && mine < kBlocks && first < lane.width) {
      store_scale(to, place.row, first / kBlockCols, scale);
    }
    const Scaler own = scaler_of(scale);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const auto of_block = [&](float value) {
        return __shfl_sync(kAllLanes, value, i / kBlockPacks, kBlockLanes);
      };
      store(i, {divides(As::rule()) ? of_block(own.divisor) : 0, of_block(own.factor)});
    }
  }
  __device__ __forceinline__ void run() const {
    if constexpr (As::kScheme == Scheme::kTensor) {
      store_all(given_scale(*to.given, As::rule()));
    } else if constexpr (As::kScheme == Scheme::kToken) {
      const Scale scale = scale_from(largest_of_row());
      if (place.live && place.lane == 0 && place.warp == 0) {
        store_scale(to, place.row, 0, scale);
      }
      store_all(scale);
    } else {
      store_blocks();
    }
  }
};

// A ForwardOp with that end; As is a QuantizeAs.
template <typename Op_, typename As>
struct QuantizedOp : Op_ {
  using Args = QuantizedForwardArgs;
  using Norm = typename Op_::Norm;
  using Access = typename Op_::Access;
  using Epilogue = typename Op_::Epilogue;
  using Row = typename Op_::Source::Row;
  using A = Accumulator<Row>;
  using Y = typename Epilogue::Output;
  static_assert(Access::kWhole, "rows of whole packs");

  template <typename Tile, typename Lane, typename Parameters, typename Beside, int N, int kVectors>
  __device__ __forceinline__ static void write(const Args& args, const ForwardPlace& place,
                                               const Lane& lane,
                                               Parameters (&parameters)[Tile::kAhead],
                                               const Beside& beside,
                                               const Pack<Row, N> (&packs)[kVectors],
                                               const Normalizer<A>& normalizer) {
    Epilogue epilogue(args, place.row, lane);
    Pack<Y, N> results[kVectors];
    Y* const output = static_cast<Y*>(args.output.data) + place.row * lane.width;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      A values[N];
      to_values(packs[i], values);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        values[j] = Norm::normalized(values[j], normalizer);
      }
      epilogue.template apply<Norm>(parameters[i % Tile::kAhead], beside, i, values);
      results[i] = rounded<Y>(values);
      if (args.output.data != nullptr) {
        Access::store_pack(lane, output, i, results[i]);
      }
      if (i + Tile::kAhead < kVectors) {
        const int next = i + Tile::kAhead;
        auto& own = parameters[i % Tile::kAhead];
        own = Epilogue::template load<Norm, Access, N>(args, place.row, lane.col(next),
                                                       lane.template valid<N>(next), own);
      }
    }
    QuantizedRow<As, Tile, Lane, Y>{args.to, place, lane, results}.run();
  }

  // Reads the row again, and then writes it like all others.
  template <typename Tile>
  __device__ __forceinline__ static void write_again(const Args& args,
                                                     const Rescue<QuantizedOp, Tile, A>& rescue,
                                                     const Normalizer<A>& normalizer) {
    constexpr int N = Tile::kPack;
    const ForwardPlace& place = rescue.place;
    const Lane<Tile::kLanes, Tile::kStep, Tile::kSure, false> lane{
        place.warp * Tile::kWarpCols + place.lane * N, rescue.width, place.live};
    Pack<Row, N> packs[Tile::kVectors];
    typename Op_::Source(args, place.row).template read<Access>(lane, packs);
    typename Epilogue::template Beside<N, Tile::kVectors> beside;
    Epilogue::template load_beside<Access>(args, place.row, lane, beside);
    typename Epilogue::template Parameters<N> parameters[Tile::kAhead];
#pragma unroll
    for (int i = 0; i < Tile::kAhead; ++i) {
      parameters[i] = Epilogue::template load<Norm, Access, N>(args, place.row, lane.col(i),
                                                               lane.template valid<N>(i));
    }
    write<Tile>(args, place, lane, parameters, beside, packs, normalizer);
  }
};

}  // namespace fused_op::cuda
