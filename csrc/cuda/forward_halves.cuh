// Forward of epilogues that take two packs half a row apart at once (core/epilogue.h), for rows of
// which each lane has both. Compiled by nvcc and by NVRTC; torch-free.
#pragma once

#include "core/convert.h"
#include "core/epilogue.h"
#include "core/norm_math.h"
#include "core/pack.h"

namespace fused_op::cuda {

// Whether an epilogue takes two packs half a row apart at once, and a lane has both.
template <typename Op, typename Tile>
constexpr bool kTakesHalves = takes_halves<typename Op::Epilogue>() && Op::Access::kWhole &&
                              Tile::kWidth == Tile::kWarpCols && Tile::kVectors % 2 == 0;

// As write_row() in forward_rows.cuh, for such an epilogue. All parameters are loaded.
template <typename Op, typename Lane, typename Parameters, typename Row, int N, int kVectors,
          typename A>
__device__ __forceinline__ void write_halves(const typename Op::Args& args, std::int64_t row,
                                             const Lane& lane,
                                             const Parameters (&parameters)[kVectors],
                                             const Pack<Row, N> (&packs)[kVectors],
                                             const Normalizer<A>& normalizer) {
  using Norm = typename Op::Norm;
  using Access = typename Op::Access;
  using Epilogue = typename Op::Epilogue;
  using Y = typename Epilogue::Output;
  Y* const output = static_cast<Y*>(args.output.data) + row * lane.width;
  Epilogue epilogue(args, row, lane);
  constexpr int kApart = kVectors / 2;
#pragma unroll
  for (int i = 0; i < kApart; ++i) {
    A values[2][N];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      to_values(packs[i + half * kApart], values[half]);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        values[half][j] = Norm::normalized(values[half][j], normalizer);
      }
    }
    Pack<Y, N> results[2];
    epilogue.template apply_to_halves<Norm>(parameters[i], parameters[i + kApart], i, values,
                                            results);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Access::store_pack(lane, output, i + half * kApart, results[half]);
    }
  }
}

}  // namespace fused_op::cuda
