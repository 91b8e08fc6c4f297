// Forward of a range of rows. Included only by a level: level.h.
#pragma once

#include "cpu/add.h"
#include "cpu/careful.h"
#include "cpu/level.h"
#include "cpu/sums.h"
#include "cpu/tiles.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

template <typename Norm, typename Met>
constexpr bool kAddsBias = Norm::kHasBias || std::is_same_v<Met, Biased>;

template <int kLanes, typename Norm, typename Met, typename X, typename A>
FUSED_OP_CPU_INLINE void affine_pack(const X* x, const A* weight, const A* bias,
                                     const Normalizer<A> normalizer, X* __restrict y) {
  const Pack<kLanes, X, A> values(x);
  const Pack<kLanes, A, A> weights(weight);
  constexpr bool kBias = kAddsBias<Norm, Met>;
  const Pack<kBias ? kLanes : 0, A, A> biases(bias);
  const auto result = [&](int j) {
    const A xhat = Met()(Norm::normalized(values[j], normalizer));
    return kBias ? multiply_add(xhat, weights[j], biases[j]) : xhat * weights[j];
  };
  store_results<kLanes, A>(result, y);
}

template <int kLanes, typename Norm, typename Met, typename X, typename A>
FUSED_OP_CPU_INLINE void affine_packs(const X* x, const A* weight, const A* bias,
                                      const Normalizer<A> normalizer, std::int64_t cols, X* y,
                                      const X* next) {
  std::int64_t col = 0;
  for (; col + kLanes <= cols; col += kLanes) {
    stay_scalar<kLanes>();
    prefetch_pack<kLanes>(next + col);
    affine_pack<kLanes, Norm, Met>(x + col, weight + col, bias + col, normalizer, y + col);
  }
  if (col < cols) {
    col = cols - kLanes;
    affine_pack<kLanes, Norm, Met>(x + col, weight + col, bias + col, normalizer, y + col);
  }
}

// For the rare row with a scale: element by element, with the same bits.
template <typename Norm, typename Met, typename X, typename A>
__attribute__((noinline)) void affine_scaled(const X* x, const A* weight, const A* bias,
                                             const Normalizer<A>& normalizer, std::int64_t cols,
                                             X* y) {
  affine_packs<1, Norm, Met>(x, weight, bias, normalizer, cols, y, x);
}

// y = x̂ · weight + bias for a row or a part of it. y overlaps nothing else, because the last pack
// is written over part of the one before it. `next` points to what will be read next, and need not
// exist.
template <int kLanes, typename Norm, typename Met, typename X, typename A>
FUSED_OP_CPU_INLINE void affine(const X* x, const A* weight, const A* bias,
                                const Normalizer<A>& normalizer, std::int64_t cols, X* y,
                                const X* next) {
  if (normalizer.scale == A(1)) {  // costs nothing where the compiler knows the scale
    const Normalizer<A> plain{A(1), normalizer.mean, normalizer.shift, normalizer.rstd};
    affine_packs<kLanes, Norm, Met>(x, weight, bias, plain, cols, y, next);
  } else {
    affine_scaled<Norm, Met>(x, weight, bias, normalizer, cols, y);
  }
}

// The same for rows of kCols columns.
template <int kCols, typename Norm, typename Met, typename A>
FUSED_OP_CPU_SHARED void affine_rows(const A* __restrict x, const A* __restrict weight,
                                     const A* __restrict bias, const A* __restrict mean,
                                     const A* __restrict shift, const A* __restrict rstd,
                                     std::int64_t rows, A* __restrict y) {
  constexpr bool kBias = kAddsBias<Norm, Met>;
  A weights[kCols], biases[kCols];
  std::copy_n(weight, kCols, weights);
  std::copy_n(bias, kBias ? kCols : 0, biases);
#pragma omp simd
  for (std::int64_t r = 0; r < rows; ++r) {
    const Normalizer<A> normalizer{A(1), mean[r], shift[r], rstd[r]};
    for (int c = 0; c < kCols; ++c) {
      const A xhat = Met()(Norm::normalized(x[r * kCols + c], normalizer));
      y[r * kCols + c] = kBias ? multiply_add(xhat, weights[c], biases[c]) : xhat * weights[c];
    }
  }
}

// Computes normalisers and statistics from the moments of a tile. Returns how many rows need care.
// Compiled once for all instances of Forward, like add_residual().
template <typename Norm, typename A>
__attribute__((noinline)) int normalize_rows(const NormForwardArgs& args, const Tile& tile,
                                             const A* __restrict mean, const A* __restrict rest,
                                             const A* __restrict second, A* __restrict shift,
                                             A* __restrict rstd) {
  const double inverse = inverse_divisor(args);
  const A eps = static_cast<A>(args.eps);
  int careful = 0;
#pragma omp simd reduction(+ : careful)
  for (std::int64_t r = 0; r < tile.rows; ++r) {
    const Moments<A> found{mean[r], rest[r], second[r]};
    const Normalizer<A> normalizer = normalizer_of_row<Norm>(found, A(1), inverse, eps);
    shift[r] = normalizer.shift;
    rstd[r] = normalizer.rstd;
    careful += static_cast<int>(needs_care(second[r]));
  }
  if (args.stats != nullptr) {
    A* const stats = static_cast<A*>(args.stats);
    const std::int64_t all_rows = args.rows;
    const std::int64_t first = tile.row;
#pragma omp simd
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      const Moments<A> found{mean[r], rest[r], second[r]};
      Norm::save(Normalizer<A>{A(1), mean[r], shift[r], rstd[r]}, found, stats, first + r,
                 all_rows);
    }
  }
  return careful;
}

// Rows of type X are read and written in place. If X is the accumulator type, rows may have been
// converted to it, and may have to be converted back.
template <int kLanes, typename Norm, typename A, typename X>
class Forward {
  static constexpr bool kMayBeLong = kLanes * sizeof(A) >= 64;
  static constexpr bool kNarrow = kLanes == 1;

 public:
  explicit Forward(const NormForwardArgs& call)
      : args_(call),
        cols_(call.cols),
        source_(call.sum == nullptr ? call.input : ConstRows{call.sum, call.dtype, call.cols}),
        drops_output_(call.dropout.active && call.sum == nullptr),
        is_direct_(call.output.dtype == kDTypeOf<X> && !drops_output_),
        weight_(call.weight, call.param_dtype, cols_, A(1)),
        bias_(call.bias, call.param_dtype, grads_of(call.kind) == 2 ? cols_ : 0, A(0)) {}

  void run(std::int64_t first_row, std::int64_t last_row) {
    const std::int64_t tile_rows = rows_of_tile(args_.rows, cols_, args_.dtype);
    for (std::int64_t row = first_row; row < last_row; row += tile_rows) {
      const Tile tile{row, std::min(tile_rows, last_row - row), 0, cols_};
      if constexpr (kMayBeLong) {
        if (is_long(cols_)) {
          run_long(tile);
          continue;
        }
      }
      run_tile(tile);
    }
  }

 private:
  View<X> read(const Tile& tile) {
    if constexpr (std::is_same_v<X, A>) {
      return read_tile(source_, tile, x_, kNarrow);
    } else {
      return view_tile<X>(source_, tile);
    }
  }

  // A value close to the mean, from the first and the last few of `cols` columns.
  static FUSED_OP_CPU_INLINE A center_of(const X* x, std::int64_t cols) {
    if constexpr (!Norm::kCentered) {
      return A(0);
    }
    constexpr int kFew = std::min(kLanes, 16);
    const Pack<kFew, X, A> first(x), last(x + cols - kFew);
    A halves[kFew];
#pragma omp simd
    for (int j = 0; j < kFew; ++j) {
      halves[j] = (first[j] + last[j]) * A(0.5);
    }
    return add_lanes(halves) / A(kFew);
  }
  static std::int64_t near_cols(std::int64_t cols) { return std::min(cols, kTileCols); }

  void put(std::int64_t r, const Moments<A>& found) {
    mean_[r] = found.mean;
    rest_[r] = found.rest;
    second_[r] = found.second;
  }

  // The moments of the rows of a tile, in passes over all of them, so that no row waits for its own
  // sums. Not inlined: ordinary and long rows share it.
  __attribute__((noinline)) void measure(const View<X>& x, std::int64_t rows) {
    double sums[kTileRows], squares[kTileRows];
    for (std::int64_t r = 0; r < rows; ++r) {
      const X* const values = x.row(r);
      mean_[r] = center_of(values, near_cols(cols_));
      Totals totals;
      add_deviations<kLanes, Norm::kCentered>(values, cols_, A(1), mean_[r], totals);
      sums[r] = totals.sum;
      squares[r] = totals.squares;
    }
#pragma omp simd
    for (std::int64_t r = 0; r < rows; ++r) {
      put(r, moments_of(mean_[r], {sums[r], squares[r]}, double_cols_));
    }
  }
  template <int kCols>
  FUSED_OP_CPU_SHARED static void measure_narrow(const A* __restrict x, std::int64_t rows,
                                                 A* __restrict mean, A* __restrict rest,
                                                 A* __restrict second) {
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

  // Returns how many rows need care.
  int normalize(const Tile& tile) {
    return normalize_rows<Norm>(args_, tile, mean_, rest_, second_, shift_, rstd_);
  }
  // Puts the normalisers of rows that need care in the places of theirs.
  __attribute__((noinline)) void take_care(const Tile& tile) {
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      Normalizer<A> normalizer{A(1), mean_[r], shift_[r], rstd_[r]};
      if (needs_care(second_[r])) {
        normalizer = careful_normalizer<kLanes, Norm>(args_, source_, tile.row + r, mean_[r]);
      }
      scale_[r] = normalizer.scale;
      mean_[r] = normalizer.mean;
      shift_[r] = normalizer.shift;
      rstd_[r] = normalizer.rstd;
    }
  }

  X* output_of(const Tile& tile) const {
    if constexpr (std::is_same_v<X, A>) {
      if (!is_direct_) {
        return y_;
      }
    }
    return static_cast<X*>(args_.output.data) + tile.row * cols_ + tile.col;
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
      add_residual<A>(args_, tile);
    }
    const View<X> x = read(tile);
    if constexpr (kNarrow) {
      run_narrow(tile, x.first);
    } else {
      run_rows(tile, x);
    }
  }
  void run_rows(const Tile& tile, const View<X>& x) {
    measure(x, tile.rows);
    const bool careful = normalize(tile) > 0;
    if (careful) {
      take_care(tile);
    }
    if (cols_ <= kTileCols) {
      write(tile, x, careful);
      return;
    }
    for (std::int64_t col = 0, count = 0; col < cols_; col += count) {
      count = piece(col, cols_, kTileCols);
      write({tile.row, 1, col, count}, {x.first + col, x.stride}, careful);
    }
  }
  void run_narrow(const Tile& tile, const A* x) {
    with_narrow(cols_,
                [&]<int kCols>() { measure_narrow<kCols>(x, tile.rows, mean_, rest_, second_); });
    const int careful = normalize(tile);
    const A* const weight = weight_.from(0, cols_);
    const A* const bias = bias_.from(0, cols_);
    with_met([&]<typename Met>(Met) {
      with_narrow(cols_, [&]<int kCols>() {
        affine_rows<kCols, Norm, Met>(x, weight, bias, mean_, shift_, rstd_, tile.rows,
                                      output_of(tile));
      });
    });
    finish(tile);
    for (std::int64_t r = 0; careful > 0 && r < tile.rows; ++r) {
      if (needs_care(second_[r])) {  // computed again, alone, in the place of row 0
        const Tile row{tile.row + r, 1, 0, cols_};
        run_rows(row, read(row));
      }
    }
  }
  template <typename Function>
  void with_met(const Function& function) {
    if (!Norm::kHasBias && args_.kind == NormKind::kBiasedRmsNorm) {
      return function(Biased());
    }
    with_rounding<X>(args_.rounding, args_.input.dtype, function);
  }
  // Of rows, or of a part of one. Not inlined: ordinary and long rows share it.
  template <typename Met>
  __attribute__((noinline)) void write_rows(const Tile& tile, const View<X>& x, bool careful) {
    const A* const weight = weight_.from(tile.col, tile.cols);
    const A* const bias = bias_.from(tile.col, tile.cols);
    X* const output = output_of(tile);
    const std::int64_t stride = is_direct_ ? cols_ : tile.cols;
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      const Normalizer<A> normalizer{careful ? scale_[r] : A(1), mean_[r], shift_[r], rstd_[r]};
      affine<kLanes, Norm, Met>(x.row(r), weight, bias, normalizer, tile.cols, output + r * stride,
                                x.row(r + tile.rows));
    }
  }
  __attribute__((noinline)) void write(const Tile& tile, const View<X>& x, bool careful) {
    with_met([&]<typename Met>(Met) { write_rows<Met>(tile, x, careful); });
    finish(tile);
  }

  // Computes long rows in parts, which are read again for each pass.
  void run_long(const Tile& tile) {
    for (std::int64_t col = 0, count = 0; args_.sum != nullptr && col < cols_; col += count) {
      count = piece(col, cols_, kTileCols);
      add_residual<A>(args_, {tile.row, tile.rows, col, count});
    }
    if (lies_ready(source_, kDTypeOf<X>)) {
      measure(view_tile<X>(source_, tile), tile.rows);
    } else {
      measure_parts(tile);
    }
    const bool careful = normalize(tile) > 0;
    if (careful) {
      take_care(tile);
    }
    for (std::int64_t col = 0, count = 0; col < cols_; col += count) {
      count = piece(col, cols_, kTileCols);
      const Tile part{tile.row, tile.rows, col, count};
      write(part, read(part), careful);
    }
  }
  void measure_parts(const Tile& tile) {
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      const Tile near{tile.row + r, 1, 0, near_cols(cols_)};
      const A center = center_of(read(near).first, near.cols);
      const Totals totals = deviations_of_row<kLanes, Norm>(source_, near.row, cols_, A(1), center);
      put(r, moments_of(center, totals, double_cols_));
    }
  }

  const NormForwardArgs& args_;
  const std::int64_t cols_;
  const ConstRows source_;  // the values that are normalised
  const bool drops_output_;
  const double double_cols_ = static_cast<double>(cols_);
  const bool is_direct_;  // the output is written as it is computed
  Parameter<A> weight_, bias_;
  A* const x_ = tile_buffer<A>(0);
  A* const y_ = tile_buffer<A>(1);
  // One for each row of the tile.
  A mean_[kTileRows], rest_[kTileRows], second_[kTileRows], shift_[kTileRows], rstd_[kTileRows];
  A scale_[kTileRows];  // only if a row of the tile needs care
};

inline void forward(const NormForwardArgs& args, std::int64_t first_row, std::int64_t last_row) {
  const bool adds = args.sum != nullptr;
  const bool converts = (!adds && !lies_ready(args.input, args.dtype)) ||
                        (!adds && args.dropout.active) || args.output.dtype != args.dtype;
  const auto run = [&]<int kLanes, typename Norm, typename A>() {
    const auto run_elements = [&]<typename X>() {
      Forward<kLanes, Norm, A, X>(args).run(first_row, last_row);
    };
    with_elements<kLanes, A>(converts ? kDTypeOf<A> : args.dtype, run_elements);
  };
  with_types(args.kind, args.dtype, args.cols, run);
}

}  // namespace fused_op::cpu::FUSED_OP_CPU_LEVEL
