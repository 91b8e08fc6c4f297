// How a row is laid over threads, and which layout a row length gets. The layout depends on the row
// length and the element size alone: that is what makes a row's result independent of the number of
// rows, and it is why these functions do not see it. Host and device; torch-free.
//
// A tile gives kLanes lanes to a row, or, with 32 lanes, as many whole warps as the row needs. Each
// warp owns kVectors·32 neighbouring 16-byte vectors, each lane every 32nd of them.
#pragma once

#include <cstdint>

#include "core/pack.h"

namespace fused_op::cuda {

template <int kLanes_, int kVectors_>
struct RowTile {
  static constexpr int kLanes = kLanes_;
  static constexpr int kVectors = kVectors_;
  static constexpr bool kOneWarp = kLanes < 32;  // several rows to a warp
  static constexpr bool kCluster = false;
  static constexpr int kSpread = 1;  // warps that share what one would hold
};

// Forward, sm_90: the warps of a row are those of a cluster.
struct ClusterTile : RowTile<32, 4> {
  static constexpr bool kCluster = true;
};

// Forward of few rows: RowTile<32, kSpread> with a warp for each of the vectors. They exchange
// every sum, and so give the same bits, sooner.
template <int kSpread_>
struct SpreadTile : RowTile<32, 1> {
  static constexpr int kSpread = kSpread_;
};
constexpr int kMaxSpreadThreads = 512;

// Warps that share a row of `vectors` 16-byte vectors.
template <typename Tile>
FUSED_OP_HD constexpr int row_warps(std::int64_t vectors) {
  constexpr std::int64_t kWarpVectors = 32 * Tile::kVectors;
  return Tile::kOneWarp ? 1 : static_cast<int>((vectors + kWarpVectors - 1) / kWarpVectors);
}

// Forward: a CTA holds one row, or several rows of one warp at most. Registers are capped so that
// many CTAs are resident: loads of one overlap the arithmetic of the others. No cap may spill.
constexpr int kMaxRowThreads = 512;
constexpr std::int64_t kMaxForwardVectors = kMaxRowThreads * 4;  // of a row in one CTA
// Longer rows are read twice by one CTA, or lie over the CTAs of a cluster (sm_90), at most
// kMaxCluster of them.
constexpr int kMaxCluster = 16;
constexpr int kMaxCtaParts = kMaxRowThreads / 32;  // warps
constexpr int kMaxParts = kMaxCtaParts * kMaxCluster;
constexpr std::int64_t kMaxClusterVectors = kMaxForwardVectors * kMaxCluster;
template <typename W, typename Source, typename Access, typename Tile>
struct ForwardBounds {
  static constexpr int kElement = sizeof(typename Source::Element);
  static constexpr bool kManyLoads = Source::kGradStreams == 3 || sizeof(W) > kElement;
  static constexpr bool kShifted = Access::kSharesBlocks;
  // Threads of a multiprocessor that share its 65536 registers.
  static constexpr int kThreadsPerSm = kElement == 8 || (kShifted && kManyLoads) ? 512
                                       : kShifted || kManyLoads                  ? 768
                                                                                 : 1024;
  static constexpr int kThreads = Tile::kOneWarp      ? 128
                                  : Tile::kSpread > 1 ? kMaxSpreadThreads
                                                      : kThreadsPerSm;
  static constexpr int kCtasPerSm = Tile::kOneWarp ? kThreadsPerSm / kThreads : 1;
};

// Four vectors a lane, so that a row's own work (sums over lanes, its root, its addresses) is
// spread over many; two or one where four would leave a row to one lane or two, whose loads then
// lie apart. H200, bf16, share of the limit: 0.76 with <1, 4>, 0.93 with <2, 2> at 2097152x32; 0.90
// with <2, 4>, 0.93 with <4, 2> at 1048576x64; 0.95 with <16, 4>, 0.91 with <32, 2> at 262144x512.
template <typename Function>
auto with_short_forward_tile(std::int64_t vectors, Function&& function) {  // up to kMaxSplitBytes
  if (vectors <= 1) return function.template operator()<RowTile<1, 1>>();
  if (vectors <= 2) return function.template operator()<RowTile<2, 1>>();
  if (vectors <= 4) return function.template operator()<RowTile<2, 2>>();
  if (vectors <= 8) return function.template operator()<RowTile<4, 2>>();
  if (vectors <= 16) return function.template operator()<RowTile<4, 4>>();
  return function.template operator()<RowTile<8, 4>>();
}
template <typename Function>
auto with_forward_tile(std::int64_t vectors, Function&& function) {
  if (vectors <= 32) return with_short_forward_tile(vectors, function);
  if (vectors <= 64) return function.template operator()<RowTile<16, 4>>();
  // Three where they make do with as many warps.
  if ((vectors + 95) / 96 == (vectors + 127) / 128) {
    return function.template operator()<RowTile<32, 3>>();
  }
  return function.template operator()<RowTile<32, 4>>();
}

// Forward and backward of the flexible kernels, by packs of their own length.
constexpr std::int64_t kMaxFlexibleVectors = kMaxRowThreads * 2;
template <typename Function>
auto with_flexible_tile(std::int64_t vectors, Function&& function) {
  if (vectors <= 1) return function.template operator()<RowTile<1, 1>>();
  if (vectors <= 4) return function.template operator()<RowTile<4, 1>>();
  if (vectors <= 8) return function.template operator()<RowTile<8, 1>>();
  if (vectors <= 16) return function.template operator()<RowTile<16, 1>>();
  if (vectors <= 32) return function.template operator()<RowTile<32, 1>>();
  return function.template operator()<RowTile<32, 2>>();
}

// Backward: a CTA holds several rows side by side, 512 threads at most: 128 registers a thread, of
// which the parameter gradients take up to 64.
constexpr std::int64_t kMaxBackwardVectors = kMaxRowThreads * 4;

// How good `per_lane` vectors a lane are for rows of `vectors`: the share of a CTA's lanes that
// have work, less where only one row fits, since its barriers then stop the whole multiprocessor,
// and less where a thread has too much to keep the row in registers.
constexpr std::int64_t backward_merit(std::int64_t vectors, int per_lane) {
  const std::int64_t warps = (vectors + 32 * per_lane - 1) / (32 * per_lane);
  const std::int64_t rows = kMaxRowThreads / 32 / warps;
  return rows * vectors * (rows == 1 ? 9 : 10) * (per_lane == 2 ? 4 : 3) *
         (12 / per_lane);  // 12: divisible by 2, 3, 4
}

// The tiles of rows up to kMaxSplitBytes.
template <typename Function>
auto with_short_backward_tile(std::int64_t vectors, Function&& function) {
  if (vectors <= 1) return function.template operator()<RowTile<1, 1>>();
  if (vectors <= 2) return function.template operator()<RowTile<2, 1>>();
  if (vectors <= 4) return function.template operator()<RowTile<4, 1>>();
  if (vectors <= 8) return function.template operator()<RowTile<8, 1>>();
  if (vectors <= 16) return function.template operator()<RowTile<16, 1>>();
  return function.template operator()<RowTile<32, 1>>();
}

template <typename Function>
auto with_backward_tile(std::int64_t vectors, Function&& function) {
  if (vectors <= 32) return with_short_backward_tile(vectors, function);
  // The fewest vectors a lane of equal merit: two keep the weight in registers too. H200, bf16,
  // share of the limit with 2, 3, 4 vectors: 0.91 0.70 0.82 at 131072x1024, 0.62 0.80 0.89 at
  // 26214x5120, 0.80 0.75 0.84 at 16384x8192.
  const std::int64_t two = backward_merit(vectors, 2);
  const std::int64_t three = backward_merit(vectors, 3);
  const std::int64_t four = backward_merit(vectors, 4);
  if (two >= three && two >= four) return function.template operator()<RowTile<32, 2>>();
  if (three >= four) return function.template operator()<RowTile<32, 3>>();
  return function.template operator()<RowTile<32, 4>>();
}

}  // namespace fused_op::cuda
