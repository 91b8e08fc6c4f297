// The integers that say how backward spreads rows too long for a CTA over threads. Plans compute
// with them, and the kernels of backward_columns.cuh and backward_cluster.cuh are compiled for
// them. Host and device; torch-free.
#pragma once

#include <cstdint>

#include "cuda/backward_tile.h"

namespace fused_op::cuda {

// A row is cut into units of 16 bytes of its widest stream. Pieces of a row are processed at the
// same time. A thread has kPieceUnits units; the distance between them is the number of threads of
// all pieces of the row.
constexpr int kPieceThreads = 512;
constexpr int kPieceUnits = 4;
FUSED_OP_HD constexpr std::int64_t row_pieces(std::int64_t cols, int unit) {
  const std::int64_t piece = std::int64_t{kPieceThreads} * kPieceUnits * unit;
  return (cols + piece - 1) / piece;
}

// Threads of a CTA of the second kernel, with one unit each.
constexpr int kColumnThreads = 128;

// A unit: kVectors packs of kPack elements. The lanes of a warp take neighbouring packs.
template <int kPack_, int kVectors_>
struct ColumnsTile {
  static constexpr int kPack = kPack_;
  static constexpr int kVectors = kVectors_;
  static constexpr int kUnit = kPack * kVectors;
};

constexpr int kMostCluster = 16;  // CTAs

// How many rows the kernel for clusters keeps in shared memory. The parameters of a CTA's columns
// follow them there.
template <int kPack_, int kStages_>
struct ClusterTile {
  static constexpr int kPack = kPack_;
  static constexpr int kStages = kStages_;
  // For LaneParameters: the CTA's threads are the lanes of one group.
  static constexpr int kLanes = kPieceThreads;
  static constexpr int kVectors = kPieceUnits;
  static constexpr bool kParametersStay = false;
};

}  // namespace fused_op::cuda
