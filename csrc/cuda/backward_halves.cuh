// Backward of epilogues that take two packs half a row apart at once (core/epilogue.h), for rows
// that are one pack of each lane: the lane of the other half passes its pack of dy. Compiled by
// nvcc and by NVRTC; torch-free.
#pragma once

#include "core/epilogue.h"
#include "core/pack.h"
#include "cuda/row_sum.cuh"

namespace fused_op::cuda {

template <typename Op, typename Tile>
constexpr bool kPassesHalves =
    takes_halves<typename Op::Epilogue>() && Tile::kWidth == Tile::kStep && Tile::kVectors == 1;

// What a lane needs beside its own packs of a row.
template <typename Op, typename Tile, bool kPasses = kPassesHalves<Op, Tile>>
class Halves {
  static constexpr int N = Tile::kPack;
  using Args = typename Op::Args;
  using GradOutput = typename Op::GradOutput;
  using OfRow = typename Op::Epilogue::template OfRow<N>;

 public:
  Pack<GradOutput, N> other;  // of dy
  OfRow of_row;

  __device__ __forceinline__ Halves(const Args& args, std::int64_t row, int col)
      : of_next_row_(load(args, row, col)) {}

  // Goes on to a row, of which `dy` is this lane's pack. All lanes of a warp take part, those
  // without a row, too. What the epilogue reads of a row is loaded while the row before is
  // computed.
  __device__ __forceinline__ void advance(const Args& args, const Pack<GradOutput, N>& dy,
                                          std::int64_t next_row, int col) {
#pragma unroll
    for (int k = 0; k < static_cast<int>(sizeof(dy.words) / sizeof(dy.words[0])); ++k) {
      other.words[k] = __shfl_xor_sync(kAllLanes, dy.words[k], Tile::kLanes / 2);
    }
    of_row = of_next_row_;
    of_next_row_ = load(args, next_row, col);
  }

 private:
  __device__ __forceinline__ static OfRow load(const Args& args, std::int64_t row, int col) {
    return row < args.rows ? Op::Epilogue::template load_of_row<N>(args, row, col) : OfRow{};
  }

  OfRow of_next_row_;
};

template <typename Op, typename Tile>
class Halves<Op, Tile, false> {
 public:
  __device__ __forceinline__ Halves(const typename Op::Args&, std::int64_t, int) {}
};

}  // namespace fused_op::cuda
