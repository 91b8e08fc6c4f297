// The sum of input and residual: of a tile, as the first step of Forward, and of a range of rows
// alone. Included only by a level: level.h.
#pragma once

#include "cpu/elements.h"
#include "cpu/level.h"
#include "cpu/tiles.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

// sum = input + residual. The statistics will be those of the rounded sum, because that is what
// backward reads.
template <typename A>
__attribute__((noinline)) void add_residual(const NormForwardArgs& args, const Tile& tile) {
  const bool is_direct = args.dtype == kDTypeOf<A>;
  A* const x_buffer = tile_buffer<A>(0);
  A* const sum =
      is_direct ? static_cast<A*>(args.sum) + tile.row * args.cols + tile.col : tile_buffer<A>(2);
  const std::int64_t stride = is_direct ? args.cols : tile.cols;
  View<A> x{x_buffer, tile.cols};
  if (args.dropout.active) {
    copy_tile(args.input, tile, x_buffer);
    drop_tile(args.dropout, tile, x_buffer);
  } else {
    x = read_tile(args.input, tile, x_buffer);
  }
  const View<A> residual = read_tile(args.residual, tile, tile_buffer<A>(1));
  for (std::int64_t r = 0; r < tile.rows; ++r) {
    add_rows(x.row(r), residual.row(r), tile.cols, sum + r * stride);
  }
  if (!is_direct) {
    write_tile(sum, args.sum, args.dtype, tile, args.cols);
  }
}

inline void add(const NormForwardArgs& args, std::int64_t first_row, std::int64_t last_row) {
  const std::int64_t cols = args.cols;
  const std::int64_t tile_rows = rows_of_tile(args.rows, cols, args.dtype);
  for (std::int64_t row = first_row; row < last_row; row += tile_rows) {
    const std::int64_t rows = std::min(tile_rows, last_row - row);
    for (std::int64_t col = 0, count = 0; col < cols; col += count) {
      count = is_long(cols) ? piece(col, cols, kTileCols) : cols;
      const Tile tile{row, rows, col, count};
      with_accumulators(args.dtype, [&]<typename A>() { add_residual<A>(args, tile); });
    }
  }
}

}  // namespace fused_op::cpu::FUSED_OP_CPU_LEVEL
