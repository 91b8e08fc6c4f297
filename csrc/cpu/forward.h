// Forward of a range of rows. Included by a level alone: level.h.
#pragma once

#include "cpu/level.h"
#include "cpu/sums.h"
#include "cpu/tiles.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

template <int kLanes, typename Norm, typename A>
FUSED_OP_CPU_INLINE void affine_pack(const A* __restrict x, const A* __restrict weight,
                                     const A* __restrict bias, const Normalizer<A> normalizer,
                                     A* __restrict y) {
#pragma omp simd
  for (int j = 0; j < kLanes; ++j) {
    const A xhat = Norm::normalized(x[j], normalizer);
    y[j] = Norm::kCentered ? multiply_add(xhat, weight[j], bias[j]) : xhat * weight[j];
  }
}

template <int kLanes, typename Norm, typename A>
FUSED_OP_CPU_INLINE void affine_packs(const A* x, const A* weight, const A* bias,
                                      const Normalizer<A> normalizer, std::int64_t cols, A* y,
                                      const A* next) {
  for (std::int64_t col = 0; col < cols; col += kLanes) {
    const std::int64_t at = std::min(col, cols - kLanes);
    prefetch_pack<kLanes>(next + at);
    affine_pack<kLanes, Norm>(x + at, weight + at, bias + at, normalizer, y + at);
  }
}

// y = x̂ · weight + bias of a row or a part of it. y overlaps nothing else: the last pack is written
// over a share of the one before it. `next` is what will be read next, and need not exist.
template <int kLanes, typename Norm, typename A>
FUSED_OP_CPU_INLINE void affine(const A* x, const A* weight, const A* bias,
                                const Normalizer<A>& normalizer, std::int64_t cols, A* y,
                                const A* next) {
  if (normalizer.scale == A(1)) {  // where the compiler sees it, it costs nothing
    const Normalizer<A> plain{A(1), normalizer.mean, normalizer.shift, normalizer.rstd};
    affine_packs<kLanes, Norm>(x, weight, bias, plain, cols, y, next);
  } else {
    affine_packs<kLanes, Norm>(x, weight, bias, normalizer, cols, y, next);
  }
}

// The same of rows of kCols columns.
template <int kCols, typename Norm, typename A>
FUSED_OP_CPU_INLINE void affine_rows(const A* __restrict x, const A* __restrict weight,
                                     const A* __restrict bias, const A* __restrict mean,
                                     const A* __restrict shift, const A* __restrict rstd,
                                     std::int64_t rows, A* __restrict y) {
  A weights[kCols], biases[kCols];
  std::copy_n(weight, kCols, weights);
  std::copy_n(bias, Norm::kCentered ? kCols : 0, biases);
#pragma omp simd
  for (std::int64_t r = 0; r < rows; ++r) {
    const Normalizer<A> normalizer{A(1), mean[r], shift[r], rstd[r]};
    for (int c = 0; c < kCols; ++c) {
      const A xhat = Norm::normalized(x[r * kCols + c], normalizer);
      y[r * kCols + c] =
          Norm::kCentered ? multiply_add(xhat, weights[c], biases[c]) : xhat * weights[c];
    }
  }
}

template <int kLanes, int kCols, typename Norm, typename A>
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
    const std::int64_t tile_rows = rows_of_tile(cols_);
    for (std::int64_t row = first_row; row < last_row; row += tile_rows) {
      if (is_long(cols_)) {
        run_long_row(row);
      } else {
        run_tile({row, std::min(tile_rows, last_row - row), 0, cols_});
      }
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

  View<A> read(const Tile& tile) { return read_tile(source_, tile, x_, kCols > 0); }

  // One pass over a row.
  template <bool kSum, bool kSquares>
  FUSED_OP_CPU_INLINE Totals pass(std::int64_t row, const A* values, A scale, A mean) {
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
  // Here with a pass more for the mean.
  Moments<A> refined_moments(std::int64_t row, const A* values, A scale) {
    A mean = A(0);
    for (int i = 0; Norm::kCentered && i < 2; ++i) {
      mean += static_cast<A>(pass<true, false>(row, values, scale, mean).sum / double_cols_);
    }
    return moments_of(mean, pass<Norm::kCentered, true>(row, values, scale, mean));
  }
  Moments<A> moments_of(A mean, const Totals& totals) const {
    const double rest = totals.sum / double_cols_;
    const double second = totals.squares - rest * rest * double_cols_;
    return {mean, static_cast<A>(rest), static_cast<A>(second)};
  }

  // Of a row whose moments are not to be trusted.
  __attribute__((noinline)) Normalizer<A> careful_normalizer(std::int64_t row, const A* values) {
    A scale = A(1);
    Moments<A> found = refined_moments(row, values, scale);
    if (overflowed(found)) {
      scale = Limits<A>::kScale;
      found = refined_moments(row, values, scale);
      unscale(found, scale);
    }
    const Normalizer<A> result = Norm::normalizer(found, scale, inverse_cols_, eps_);
    if (args_.stats != nullptr) {
      Norm::save(result, found, static_cast<A*>(args_.stats), row, args_.rows);
    }
    return result;
  }

  // !trusted(), without branches.
  FUSED_OP_CPU_INLINE bool needs_care(A mean, A second) const {
    const bool is_far = !(second >= care_cols_ * mean * mean * Limits<A>::kMeanRounding);
    return static_cast<int>(is_far) | static_cast<int>(!(second <= Limits<A>::kLargest));
  }

  void put(std::int64_t r, const Moments<A>& found) {
    mean_[r] = found.mean;
    rest_[r] = found.rest;
    second_[r] = found.second;
  }

  // The moments of the rows of a tile, in passes over all of them: no row waits for its own sums.
  void measure(const View<A>& x, std::int64_t rows) {
    if constexpr (kCols > 0) {
      measure_rows(x.first, rows, mean_, rest_, second_);
      return;
    }
    double sums[kTileRows], squares[kTileRows];
    if (Norm::kCentered) {
      for (std::int64_t r = 0; r < rows; ++r) {
        Totals totals;
        add_deviations<kLanes, true, false>(x.row(r), cols_, A(1), A(0), totals);
        sums[r] = totals.sum;
      }
#pragma omp simd
      for (std::int64_t r = 0; r < rows; ++r) {
        mean_[r] = static_cast<A>(sums[r] / double_cols_);
      }
    } else {
      std::fill_n(mean_, rows, A(0));
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      Totals totals;
      add_deviations<kLanes, Norm::kCentered, true>(x.row(r), cols_, A(1), mean_[r], totals);
      sums[r] = totals.sum;
      squares[r] = totals.squares;
    }
#pragma omp simd
    for (std::int64_t r = 0; r < rows; ++r) {
      const double rest = sums[r] / double_cols_;
      rest_[r] = static_cast<A>(rest);
      second_[r] = static_cast<A>(squares[r] - rest * rest * double_cols_);
    }
  }
  static void measure_rows(const A* __restrict x, std::int64_t rows, A* __restrict mean,
                           A* __restrict rest, A* __restrict second) {
#pragma omp simd
    for (std::int64_t r = 0; r < rows; ++r) {
      A row_mean = A(0);
      if (Norm::kCentered) {
        double sum = 0;
        for (int c = 0; c < kCols; ++c) {
          sum += static_cast<double>(x[r * kCols + c]);
        }
        row_mean = static_cast<A>(sum / kCols);
      }
      A deviations = A(0);
      A squares = A(0);
      for (int c = 0; c < kCols; ++c) {
        const A deviation = x[r * kCols + c] - row_mean;
        deviations += deviation;
        squares += deviation * deviation;
      }
      const A row_rest = Norm::kCentered ? deviations / A(kCols) : A(0);
      mean[r] = row_mean;
      rest[r] = row_rest;
      second[r] = squares - row_rest * row_rest * A(kCols);
    }
  }

  // Normalisers and statistics of a tile that has been measured. Returns how many rows need care.
  int normalize(const Tile& tile) {
    int careful = 0;
#pragma omp simd reduction(+ : careful)
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      const Moments<A> found{mean_[r], rest_[r], second_[r]};
      const Normalizer<A> normalizer = Norm::normalizer(found, A(1), inverse_cols_, eps_);
      shift_[r] = normalizer.shift;
      rstd_[r] = normalizer.rstd;
      careful += static_cast<int>(needs_care(mean_[r], second_[r]));
    }
    if (args_.stats != nullptr) {
      A* const stats = static_cast<A*>(args_.stats);
      const std::int64_t all_rows = args_.rows;
      const std::int64_t first = tile.row;
#pragma omp simd
      for (std::int64_t r = 0; r < tile.rows; ++r) {
        const Moments<A> found{mean_[r], rest_[r], second_[r]};
        Norm::save(normalizer_of(r), found, stats, first + r, all_rows);
      }
    }
    return careful;
  }
  FUSED_OP_CPU_INLINE Normalizer<A> normalizer_of(std::int64_t r) const {
    return {A(1), mean_[r], shift_[r], rstd_[r]};
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

  void run_tile(const Tile& tile) {
    if (args_.sum != nullptr) {
      add_residual(tile);
    }
    const View<A> x = read(tile);
    measure(x, tile.rows);
    int careful = normalize(tile);
    A* const output = output_of(tile);
    if constexpr (kCols > 0) {
      affine_rows<kCols, Norm>(x.first, weight_.values(), bias_.values(), mean_, shift_, rstd_,
                               tile.rows, output);
    }
    for (std::int64_t r = 0; (kCols == 0 || careful > 0) && r < tile.rows; ++r) {
      Normalizer<A> normalizer = normalizer_of(r);
      if (careful > 0 && needs_care(mean_[r], second_[r])) {
        normalizer = careful_normalizer(tile.row + r, x.row(r));
      }
      if (cols_ > kTileCols) {
        write_row(tile.row + r, x.row(r), normalizer);
      } else {
        affine<kLanes, Norm>(x.row(r), weight_.values(), bias_.values(), normalizer, cols_,
                             output + r * cols_, x.row(r + tile.rows));
      }
    }
    if (cols_ <= kTileCols) {
      finish(tile);
    }
  }
  void write_row(std::int64_t row, const A* x, const Normalizer<A>& normalizer) {
    for (std::int64_t col = 0, count = 0; col < cols_; col += count) {
      count = piece(col, cols_, kTileCols);
      const Tile part{row, 1, col, count};
      affine<kLanes, Norm>(x + col, weight_.values() + col, bias_.values() + col, normalizer, count,
                           output_of(part), x + cols_ + col);
      finish(part);
    }
  }

  // In parts, which are read again for each pass.
  void run_long_row(std::int64_t row) {
    for (std::int64_t col = 0, count = 0; args_.sum != nullptr && col < cols_; col += count) {
      count = piece(col, cols_, kTileCols);
      add_residual({row, 1, col, count});
    }
    const A* const values = lies_ready<A>(source_) ? read({row, 1, 0, cols_}).first : nullptr;
    A mean = A(0);
    if (Norm::kCentered) {
      mean = static_cast<A>(pass<true, false>(row, values, A(1), A(0)).sum / double_cols_);
    }
    put(0, moments_of(mean, pass<Norm::kCentered, true>(row, values, A(1), mean)));
    const bool careful = normalize({row, 1, 0, cols_}) > 0;
    const Normalizer<A> normalizer = careful ? careful_normalizer(row, values) : normalizer_of(0);
    for (std::int64_t col = 0, count = 0; col < cols_; col += count) {
      count = piece(col, cols_, kTileCols);
      const Tile part{row, 1, col, count};
      affine<kLanes, Norm>(read(part).first, weight_.values() + col, bias_.values() + col,
                           normalizer, count, output_of(part),
                           values == nullptr ? x_ : values + cols_ + col);
      finish(part);
    }
  }

  const NormForwardArgs& args_;
  const std::int64_t cols_;
  const ConstRows source_;  // of what is normalised
  const bool drops_output_;
  const double double_cols_ = static_cast<double>(cols_);
  const A inverse_cols_ = A(1) / static_cast<A>(cols_);
  // The mean of a row of one column is exact.
  const A care_cols_ = cols_ == 1 ? A(0) : static_cast<A>(cols_);
  const A eps_ = static_cast<A>(args_.eps);
  const bool is_direct_;  // the output is written as it is computed
  const Parameter<A> weight_, bias_;
  A* const x_ = tile_buffer<A>(0);
  A* const y_ = tile_buffer<A>(1);
  A* const sum_ = tile_buffer<A>(2);
  // Of the rows of a tile.
  A mean_[kTileRows], rest_[kTileRows], second_[kTileRows], shift_[kTileRows], rstd_[kTileRows];
};

inline void forward(const NormForwardArgs& args, std::int64_t first_row, std::int64_t last_row) {
  const auto run = [&]<int kLanes, int kCols, typename Norm, typename A>() {
    Forward<kLanes, kCols, Norm, A>(args).run(first_row, last_row);
  };
  with_types(args.kind, args.dtype, args.cols, run);
}

}  // namespace fused_op::cpu::FUSED_OP_CPU_LEVEL
