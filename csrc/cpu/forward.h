// Forward of a range of rows. Included by a level alone: level.h.
#pragma once

#include "cpu/level.h"
#include "cpu/sums.h"
#include "cpu/tiles.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

template <int kLanes, typename Norm, typename A>
inline void affine_pack(const A* __restrict x, const A* __restrict weight, const A* __restrict bias,
                        const Normalizer<A> normalizer, A* __restrict y) {
  for (int j = 0; j < kLanes; ++j) {
    const A xhat = Norm::normalized(x[j], normalizer);
    y[j] = Norm::kCentered ? multiply_add(xhat, weight[j], bias[j]) : xhat * weight[j];
  }
}

// y = x̂ · weight + bias of a row or a part of it. y overlaps nothing else: the last pack is written
// over a share of the one before it.
template <int kLanes, typename Norm, typename A>
inline void affine(const A* x, const A* weight, const A* bias, const Normalizer<A>& normalizer,
                   std::int64_t cols, A* y) {
  for (std::int64_t col = 0; col < cols; col += kLanes) {
    const std::int64_t at = std::min(col, cols - kLanes);
    affine_pack<kLanes, Norm>(x + at, weight + at, bias + at, normalizer, y + at);
  }
}

template <int kLanes, typename Norm, typename A>
class Forward {
 public:
  explicit Forward(const NormForwardArgs& call)
      : args_(call),
        cols_(call.cols),
        source_(call.sum == nullptr ? call.input : ConstRows{call.sum, call.dtype, call.cols}),
        drops_output_(call.dropout.active && call.sum == nullptr),
        is_direct_(call.output.dtype == kDTypeOf<A> && !drops_output_),
        weight_(call.weight, call.param_dtype, cols_, A(1)),
        bias_(call.bias, call.param_dtype, Norm::kCentered ? cols_ : 0, A(0)) {}

  void run(std::int64_t first_row, std::int64_t last_row) {
    const std::int64_t tile_rows = std::max<std::int64_t>(1, kTileElements / cols_);
    for (std::int64_t row = first_row; row < last_row; row += tile_rows) {
      run_tile(row, std::min(tile_rows, last_row - row));
    }
  }

 private:
  // As backward reads the rounded sum, so do the statistics.
  void add_residual(const Tile& tile) {
    const View<A> x = args_.dropout.active ? dropped(tile) : read_tile(args_.input, tile, x_);
    const View<A> residual = read_tile(args_.residual, tile, y_);
    const bool is_direct = args_.dtype == kDTypeOf<A>;
    A* const total = is_direct ? static_cast<A*>(args_.sum) + tile.row * cols_ + tile.col : sum_;
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      add_rows(x.row(r), residual.row(r), tile.cols, total + r * tile.cols);
    }
    if (!is_direct) {
      write_tile(total, args_.sum, args_.dtype, tile, cols_);
    }
  }
  View<A> dropped(const Tile& tile) {
    copy_tile(args_.input, tile, x_);
    drop_tile(args_.dropout, tile, x_);
    return {x_, tile.cols};
  }

  View<A> read(const Tile& tile) { return read_tile(source_, tile, x_); }

  // One pass over a row.
  template <bool kSum, bool kSquares>
  Totals pass(std::int64_t row, const A* values, A scale, A mean) {
    Totals totals;
    if (values != nullptr) {
      add_deviations<kLanes, kSum, kSquares>(values, cols_, scale, mean, totals);
      return totals;
    }
    for (std::int64_t col = 0, count = 0; col < cols_; col += count) {
      count = piece(col, cols_, kTileCols);
      const View<A> part = read({row, 1, col, count});
      add_deviations<kLanes, kSum, kSquares>(part.first, count, scale, mean, totals);
    }
    return totals;
  }

  // Two passes: Σ(x - mean)² has no cancellation where |mean| >> deviation, unlike Σx² - mean².
  // With `refined`, a pass more for the mean.
  Moments<A> moments(std::int64_t row, const A* values, A scale, bool refined) {
    const auto cols = static_cast<double>(cols_);
    Moments<A> found{};
    for (int i = 0; Norm::kCentered && i < (refined ? 2 : 1); ++i) {
      found.mean += static_cast<A>(pass<true, false>(row, values, scale, found.mean).sum / cols);
    }
    const Totals totals = pass<Norm::kCentered, true>(row, values, scale, found.mean);
    const double rest = totals.sum / cols;
    found.rest = static_cast<A>(rest);
    found.second = static_cast<A>(totals.squares - rest * rest * cols);
    return found;
  }

  Normalizer<A> normalizer(std::int64_t row, const A* values) {
    A scale = A(1);
    Moments<A> found = moments(row, values, scale, false);
    if (!trusted(found, static_cast<A>(cols_))) {
      found = moments(row, values, scale, true);
      if (overflowed(found)) {
        scale = Limits<A>::kScale;
        found = moments(row, values, scale, true);
        unscale(found, scale);
      }
    }
    const Normalizer<A> result =
        Norm::normalizer(found, scale, A(1) / static_cast<A>(cols_), static_cast<A>(args_.eps));
    if (args_.stats != nullptr) {
      Norm::save(result, found, static_cast<A*>(args_.stats), row, args_.rows);
    }
    return result;
  }

  A* output_of(const Tile& tile) const {
    return is_direct_ ? static_cast<A*>(args_.output.data) + tile.row * cols_ + tile.col : y_;
  }
  void finish(const Tile& tile) {
    if (drops_output_) {
      drop_tile(args_.dropout, tile, y_);
    }
    if (!is_direct_) {
      write_tile(y_, args_.output.data, args_.output.dtype, tile, cols_);
    }
  }

  void run_tile(std::int64_t row, std::int64_t rows) {
    if (is_long(cols_)) {
      run_long_row(row);
      return;
    }
    const Tile tile{row, rows, 0, cols_};
    if (args_.sum != nullptr) {
      add_residual(tile);
    }
    const View<A> x = read(tile);
    A* const output = output_of(tile);
    for (std::int64_t r = 0; r < rows; ++r) {
      const Normalizer<A> found = normalizer(row + r, x.row(r));
      affine<kLanes, Norm>(x.row(r), weight_.values(), bias_.values(), found, cols_,
                           output + r * cols_);
    }
    finish(tile);
  }

  // In parts, which are read again for each pass.
  void run_long_row(std::int64_t row) {
    for (std::int64_t col = 0, count = 0; args_.sum != nullptr && col < cols_; col += count) {
      count = piece(col, cols_, kTileCols);
      add_residual({row, 1, col, count});
    }
    const bool is_ready = lies_ready<A>(source_);
    const Normalizer<A> found =
        normalizer(row, is_ready ? read({row, 1, 0, cols_}).first : nullptr);
    for (std::int64_t col = 0, count = 0; col < cols_; col += count) {
      count = piece(col, cols_, kTileCols);
      const Tile part{row, 1, col, count};
      A* const output = output_of(part);
      affine<kLanes, Norm>(read(part).first, weight_.values() + col, bias_.values() + col, found,
                           count, output);
      finish(part);
    }
  }

  const NormForwardArgs& args_;
  const std::int64_t cols_;
  const ConstRows source_;  // of what is normalised
  const bool drops_output_;
  const bool is_direct_;  // the output is written as it is computed
  const Parameter<A> weight_, bias_;
  A* const x_ = tile_buffer<A>(0);
  A* const y_ = tile_buffer<A>(1);
  A* const sum_ = tile_buffer<A>(2);
};

inline void forward(const NormForwardArgs& args, std::int64_t first_row, std::int64_t last_row) {
  const auto run = [&]<int kLanes, typename Norm, typename A>() {
    Forward<kLanes, Norm, A>(args).run(first_row, last_row);
  };
  with_types(args.kind, args.dtype, args.cols, run);
}

}  // namespace fused_op::cpu::FUSED_OP_CPU_LEVEL
