// Backward of epilogues that take two packs half a row apart at once (core/epilogue.h), for rows of
// which each lane has both. Compiled by nvcc and by NVRTC; torch-free.
#pragma once

#include "core/epilogue.h"
#include "core/pack.h"

namespace fused_op::cuda {

// Whether an epilogue takes two packs half a row apart at once, and a lane has both.
template <typename Op, typename Tile>
constexpr bool kPairsHalves = takes_halves<typename Op::Epilogue>() &&
                              Tile::kWidth == Tile::kWarpCols && Tile::kVectors % 2 == 0;

// What a lane needs of a row beside its packs of x.
template <typename Op, typename Tile, bool kPairs = kPairsHalves<Op, Tile>>
class Halves {
  static constexpr int N = Tile::kPack;
  static constexpr int kApart = Tile::kVectors / 2;
  using Args = typename Op::Args;
  using Dy = Pack<typename Op::GradOutput, N>;
  using OfRow = typename Op::Epilogue::template OfRow<N>;

 public:
  __device__ __forceinline__ Halves(const Args& args, std::int64_t row, int col) {
    load_of_next(args, row, col);
  }

  // Goes on to a row, of which dy_of(i) is this lane's pack i. What the epilogue reads of a row is
  // loaded while the row before is computed.
  template <typename DyOf>
  __device__ __forceinline__ void advance(const Args& args, std::int64_t next_row, int col,
                                          const DyOf& dy_of) {
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
      dy_[i] = dy_of(i);
    }
#pragma unroll
    for (int i = 0; i < kApart; ++i) {
      of_row_[i] = of_next_row_[i];
    }
    load_of_next(args, next_row, col);
  }

  __device__ __forceinline__ static bool is_second(int i) { return i >= kApart; }
  // Pack i of dy, and the one half a row from it.
  __device__ __forceinline__ const Dy& dy(int i) const { return dy_[i]; }
  __device__ __forceinline__ const Dy& other(int i) const {
    return dy_[(i + kApart) % Tile::kVectors];
  }
  __device__ __forceinline__ const OfRow& of_row(int i) const { return of_row_[i % kApart]; }

 private:
  __device__ __forceinline__ void load_of_next(const Args& args, std::int64_t row, int col) {
    if (row < args.rows) {
#pragma unroll
      for (int i = 0; i < kApart; ++i) {
        of_next_row_[i] = Op::Epilogue::template load_of_row<N>(args, row, col + i * Tile::kStep);
      }
    }
  }

  Dy dy_[Tile::kVectors];
  OfRow of_row_[kApart];
  OfRow of_next_row_[kApart];
};

template <typename Op, typename Tile>
class Halves<Op, Tile, false> {
 public:
  __device__ __forceinline__ Halves(const typename Op::Args&, std::int64_t, int) {}
};

}  // namespace fused_op::cuda
