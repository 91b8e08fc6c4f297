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
  // Short rows: several rows, or one, to a warp.
  static constexpr bool kOneWarp = kLanes < 32 || kVectors == 1;
};

// Warps that share a row of `vectors` 16-byte vectors.
template <typename Tile>
FUSED_OP_HD constexpr int row_warps(std::int64_t vectors) {
  constexpr std::int64_t kWarpVectors = 32 * Tile::kVectors;
  return Tile::kOneWarp ? 1 : static_cast<int>((vectors + kWarpVectors - 1) / kWarpVectors);
}

// Forward: a CTA holds one row, or several rows of one warp at most. Registers are capped so that
// many CTAs are resident: loads of one overlap the arithmetic of the others. Each cap is the
// tightest without a spill.
constexpr std::int64_t kMaxForwardVectors = 256 * 8;  // longer rows are streamed
template <typename W, typename Source, typename Access, typename Tile>
struct ForwardBounds {
  static constexpr int kThreads = Tile::kOneWarp ? 128 : 256;
  static constexpr int kElement = sizeof(typename Source::Element);
  static constexpr bool kManyLoads = Source::kGradStreams == 3 || sizeof(W) > kElement;
  static constexpr int kThreadsPerSm = !Access::kWholePacks                   ? 256
                                       : Tile::kVectors == 8 || kElement == 8 ? 512
                                       : kManyLoads                           ? 768
                                                                              : 1024;
  static constexpr int kCtasPerSm = kThreadsPerSm / kThreads;
};

template <typename Function>
auto with_forward_tile(std::int64_t vectors, Function&& function) {
  if (vectors <= 1) return function.template operator()<RowTile<1, 1>>();
  if (vectors <= 2) return function.template operator()<RowTile<1, 2>>();
  if (vectors <= 4) return function.template operator()<RowTile<1, 4>>();
  if (vectors <= 8) return function.template operator()<RowTile<2, 4>>();
  if (vectors <= 16) return function.template operator()<RowTile<4, 4>>();
  if (vectors <= 32) return function.template operator()<RowTile<8, 4>>();
  if (vectors <= 64) return function.template operator()<RowTile<16, 4>>();
  if (vectors <= 1024) return function.template operator()<RowTile<32, 4>>();
  return function.template operator()<RowTile<32, 8>>();
}

// Backward: a CTA holds several rows side by side, 512 threads at most: 128 registers a thread, of
// which the parameter gradients take up to 64.
constexpr int kMaxRowThreads = 512;
constexpr std::int64_t kMaxBackwardVectors = kMaxRowThreads * 4;

// How many of a CTA's lanes have work, in vectors of kMaxRowThreads rows side by side.
constexpr std::int64_t busy_vectors(std::int64_t vectors, int per_lane) {
  const std::int64_t warps = (vectors + 32 * per_lane - 1) / (32 * per_lane);
  return kMaxRowThreads / 32 / warps * vectors;
}

template <typename Function>
auto with_backward_tile(std::int64_t vectors, Function&& function) {
  if (vectors <= 1) return function.template operator()<RowTile<1, 1>>();
  if (vectors <= 2) return function.template operator()<RowTile<2, 1>>();
  if (vectors <= 4) return function.template operator()<RowTile<4, 1>>();
  if (vectors <= 8) return function.template operator()<RowTile<8, 1>>();
  if (vectors <= 16) return function.template operator()<RowTile<16, 1>>();
  if (vectors <= 32) return function.template operator()<RowTile<32, 1>>();
  // The fewest vectors a lane that keep most lanes busy: 5120 bf16 columns are 3 rows of 5 warps of
  // 4 vectors (94 % busy), not one row of 10 warps of 2 (63 %).
  const std::int64_t two = busy_vectors(vectors, 2) * 12 / 2;
  const std::int64_t three = busy_vectors(vectors, 3) * 12 / 3;
  const std::int64_t four = busy_vectors(vectors, 4) * 12 / 4;
  if (two >= three && two >= four) return function.template operator()<RowTile<32, 2>>();
  if (three >= four) return function.template operator()<RowTile<32, 3>>();
  return function.template operator()<RowTile<32, 4>>();
}

}  // namespace fused_op::cuda
