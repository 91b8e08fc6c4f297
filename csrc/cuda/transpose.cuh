// Exchanges rows and columns of matrices: core/transpose.h. A CTA copies a tile, so that it reads
// and writes memory in order. Compiled by NVRTC; torch-free.
#pragma once

#include "core/pack.h"
#include "core/transpose.h"
#include "cuda/dependent_launch.cuh"
#include "cuda/transpose.h"

namespace fused_op::cuda {

// grid: a CTA for each tile; the tiles of a row of tiles are neighbours. Word: as large as an
// element.
template <typename Word>
__global__ void __launch_bounds__(kTransposeThreads)
    transpose_kernel(const __grid_constant__ TransposeArgs args) {
  constexpr int kTile = kTransposeTile;
  constexpr int kWarps = kTransposeThreads / kWarpSize;
  constexpr int kSteps = kTile / kWarps;
  constexpr int kHalves = kTile / kWarpSize;  // of a row of the tile, for a lane
  // The elements of a column lie in different banks.
  __shared__ Word tile[kTile][kTile + (sizeof(Word) == 2 ? 2 : 1)];
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const auto tiles_of = [](std::int64_t size) {
    return static_cast<unsigned>((size + kTile - 1) / kTile);
  };
  const unsigned across = tiles_of(args.cols), down = tiles_of(args.rows);
  const unsigned tile_row = blockIdx.x / across;
  const std::int64_t matrix = tile_row / down;
  const std::int64_t first_row = std::int64_t{tile_row % down} * kTile;
  const std::int64_t first_col = std::int64_t{blockIdx.x % across} * kTile;
  const Word* const from = static_cast<const Word*>(args.from) + matrix * args.rows * args.cols;
  Word* const to = static_cast<Word*>(args.to) + matrix * args.rows * args.cols;
  await_kernels_before();
  Word words[kSteps][kHalves];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const std::int64_t row = first_row + warp + i * kWarps;
      const std::int64_t col = first_col + lane + half * kWarpSize;
      const bool valid = row < args.rows && col < args.cols;
      words[i][half] = valid ? from[row * args.cols + col] : Word{};
    }
  }
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      tile[warp + i * kWarps][lane + half * kWarpSize] = words[i][half];
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int col = warp + i * kWarps, row = lane + half * kWarpSize;
      if (first_col + col < args.cols && first_row + row < args.rows) {
        to[(first_col + col) * args.rows + first_row + row] = tile[row][col];
      }
    }
  }
}

}  // namespace fused_op::cuda
