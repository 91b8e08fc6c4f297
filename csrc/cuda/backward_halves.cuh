// Backward of epilogues that take two packs half a row apart at once (core/epilogue.h), for rows of
// which each lane has two such packs. Compiled by nvcc and by NVRTC; torch-free.
#pragma once

#include "core/epilogue.h"
#include "core/pack.h"

namespace fused_op::cuda {

// Whether an epilogue takes two packs half a row apart at once, and a lane has both.
template <typename Op, typename Tile>
constexpr bool kPairsHalves =
    takes_halves<typename Op::Epilogue>() && Tile::kWidth == Tile::kWarpCols && Tile::kVectors == 2;

// What a lane needs of a row beside its packs of x.
template <typename Op, typename Tile, bool kPairs = kPairsHalves<Op, Tile>>
class Halves {
  static constexpr int N = Tile::kPack;
  using Args = typename Op::Args;
  using OfRow = typename Op::Epilogue::template OfRow<N>;

 public:
  Pack<typename Op::GradOutput, N> dy[2];
  OfRow of_row;  // what the epilogue reads of it: loaded while the row before is computed

  __device__ __forceinline__ Halves(const Args& args, std::int64_t row, int col)
      : of_next_row_(load(args, row, col)) {}

  // Goes on from a row to its next; the caller sets dy.
  __device__ __forceinline__ void advance(const Args& args, std::int64_t next_row, int col) {
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
