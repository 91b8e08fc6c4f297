// How backward spreads a row over threads, as integers, and how much shared memory that takes.
// Plans choose from these tiles, and backward_kernel is compiled for them. Host and device;
// torch-free.
#pragma once

#include <cstdint>

#include "core/pack.h"

namespace fused_op::cuda {

// A row has kLanes lanes, or as many whole warps as it needs. A warp has kLanes · kVectors
// neighbouring packs of kPack elements; each lane has every kLanes-th of them. The rows of a CTA
// lie side by side.
template <int kPack_, int kLanes_, int kVectors_, int kThreads_, int kCtasPerSm_, int kStages_,
          bool kKeep_, bool kParametersStay_, bool kTail_, int kWidth_, bool kFull_>
struct BackwardTile {
  static constexpr int kPack = kPack_;
  static constexpr int kLanes = kLanes_;
  static constexpr int kVectors = kVectors_;
  static constexpr int kThreads = kThreads_;  // of a CTA, at most
  static constexpr int kCtasPerSm = kCtasPerSm_;
  static constexpr int kStages = kStages_;  // rows of a team in shared memory, with the one in use
  // Whether a thread keeps x̂ and its gradient between the two passes over a row. Otherwise it
  // reads x and dy from shared memory again.
  static constexpr bool kKeep = kKeep_;
  static constexpr bool kParametersStay = kParametersStay_;  // in registers; else in shared memory
  static constexpr bool kTail = kTail_;   // more CTAs process the last rows (see BackwardSteps)
  static constexpr int kWidth = kWidth_;  // columns; 0: known at run time
  static constexpr bool kFull = kFull_;   // no lane has a pack past the end of a row

  static constexpr int kStep = kLanes * kPack;
  static constexpr int kWarpCols = kStep * kVectors;
  static constexpr int kWarps = (kWidth + kWarpCols - 1) / kWarpCols;  // warps of a row
  // Packs that even the last lane of the last warp has inside the row.
  static constexpr int kSure = kFull         ? kVectors
                               : kWidth == 0 ? 0
                                             : (kWidth - (kWarps - 1) * kWarpCols) / kStep;
  static constexpr bool kOneWarp = kLanes < 32 || kWarps == 1;  // known at compile time
  static_assert(kStages == 2 || kStages == 3);
};

// The steps from one row of a team to its next. The launch computes them, because kernel parameters
// take no registers.
struct BackwardSteps {
  std::int64_t rows;
  std::int64_t ahead;     // rows from the one in use to the one to copy: stages - 1 steps
  std::int64_t bytes[3];  // the same in bytes of x, dy and the third stream
  // Rows before this one end at least a block of 16 bytes before their tensors do.
  std::int64_t whole_rows;
  // With a tail: its first row and its first CTA. It begins as soon as other CTAs have ended.
  std::int64_t tail_row;
  std::int64_t tail_cta;
};

// The shared memory, in bytes, that a group of lanes (those of a row that share a warp) needs for
// one row of a stream whose elements have `size` bytes. Rows that move by words keep their offset
// within a block of 16 bytes. All but the longest, which have no room for it, begin at multiples of
// 128 bytes.
FUSED_OP_HD constexpr int staged_bytes(bool by_words, int pack, int lanes, int vectors, int size) {
  const int bytes = lanes * vectors * pack * size;
  const int blocks = by_words && bytes < 2048 ? (lanes < 8 ? lanes : 8) : 1;
  const int unit = blocks * kVectorBytes;
  return (bytes + (by_words ? kVectorBytes : 0) + unit - 1) / unit * unit;
}
// The same for parameters that do not stay in registers, with `size` bytes a pack.
FUSED_OP_HD constexpr int parameter_bytes(int lanes, int vectors, int size) {
  return lanes * ((vectors * size + kVectorBytes - 1) / kVectorBytes * kVectorBytes);
}

// In backward_few_kernel: threads with neighbouring columns of a slab, and columns of each of them.
// Words take more instructions than a vector, so a slab of them is narrower.
constexpr int kSlabLanes = 8;
FUSED_OP_HD constexpr int slab_columns(bool by_words, int pack, int widest_bytes) {
  return by_words ? 2 * pack : kVectorBytes / widest_bytes;
}

// Where add_partials_kernel stores the gradients of weight and bias; null: not wanted.
struct PartialsTargets {
  void* data[2];
  bool add;  // add to the targets, which are f32
};
// The block of add_partials_kernel. A thread adds up a vector of columns over every
// kPartialsRows-th row.
constexpr int kPartialsLanes = 8;
constexpr int kPartialsRows = 16;

// Columns of a row of partial sums, which is stored in vectors.
FUSED_OP_HD constexpr std::int64_t partials_stride(std::int64_t cols) { return (cols + 7) / 8 * 8; }

}  // namespace fused_op::cuda
