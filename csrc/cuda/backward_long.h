// How backward lays rows that are too long for a CTA over threads, as integers: what a plan reckons
// with, and what the kernels of backward_columns.cuh and backward_cluster.cuh are compiled for.
// Host and device; torch-free.
#pragma once

#include <cstdint>

#include "cuda/backward_tile.h"

namespace fused_op::cuda {

// A row is dealt out in units of 16 bytes of its widest stream. Pieces of a row are taken at once:
// a thread of a CTA has kPieceUnits units, which lie apart by all threads of all of the row's
// pieces.
constexpr int kPieceThreads = 512;
constexpr int kPieceUnits = 4;
FUSED_OP_HD constexpr std::int64_t row_pieces(std::int64_t cols, int unit) {
  const std::int64_t piece = std::int64_t{kPieceThreads} * kPieceUnits * unit;
  return (cols + piece - 1) / piece;
}

// Threads of a CTA of the second kernel, which have a unit each.
constexpr int kColumnThreads = 128;

// A unit: kVectors packs of kPack elements, the lanes of a warp taking neighbouring packs.
template <int kPack_, int kVectors_>
struct ColumnsTile {
  static constexpr int kPack = kPack_;
  static constexpr int kVectors = kVectors_;
  static constexpr int kUnit = kPack * kVectors;
};

constexpr int kMostCluster = 16;  // CTAs

// Rows in shared memory, and what the parameters of a CTA's columns take there, in the kernel for
// clusters.
template <int kPack_, int kStages_>
struct ClusterTile {
  static constexpr int kPack = kPack_;
  static constexpr int kStages = kStages_;
  // As LaneParameters reads them: the CTA's threads are the lanes of one group.
  static constexpr int kLanes = kPieceThreads;
  static constexpr int kVectors = kPieceUnits;
  static constexpr bool kParametersStay = false;
};

}  // namespace fused_op::cuda
