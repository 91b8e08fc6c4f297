// Backward in one pass over the rows. The rows are cut into chunks, each with partial sums of the
// parameter gradients. Included only by a level: level.h.
#pragma once

#include "cpu/level.h"
#include "cpu/pullback.h"
#include "cpu/sums.h"
#include "cpu/tiles.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

// Which rows to compute: a range of chunks, or a range of rows of one chunk.
struct BackwardRange {
  std::int64_t first;
  std::int64_t last;
  bool of_chunks;
  // Of rows: [grads_of(kind), cols], if the gradients of the parameters are wanted.
  void* sums = nullptr;
};

// X as in Forward.
template <int kLanes, typename Norm, typename A, typename X>
class Backward {
  static constexpr bool kMayBeLong = kLanes * sizeof(A) >= 64;
  static constexpr bool kNarrow = kLanes == 1;
  // Rows whose sums stay in registers together. One lane takes only rows that are rare.
  static constexpr int kAtOnce = kLanes > 1 ? FUSED_OP_CPU_ROWS : 1;

 public:
  explicit Backward(const NormBackwardArgs& call)
      : args_(call),
        cols_(call.cols),
        drops_output_(call.dropout.active && !call.drops_input),
        wants_dx_(call.grad_input.data != nullptr || call.grad_residual.data != nullptr),
        wants_grads_(call.wants_sums()),
        sums_bias_(wants_grads_ && call.kind == NormKind::kBiasedRmsNorm),
        is_direct_(call.grad_input.data != nullptr && call.grad_input.dtype == kDTypeOf<X> &&
                   !call.drops_input && call.grad_residual.data == nullptr),
        weight_(call.weight, call.param_dtype, cols_, A(1)),
        bias_(call.bias, call.param_dtype, call.x_is_output ? cols_ : 0, A(0)) {}

  void run(const BackwardRange& range) {
    if (!range.of_chunks) {
      run_rows(range.first, range.last, static_cast<A*>(range.sums));
      return;
    }
    const std::int64_t chunks = norm_backward_chunks(args_);
    for (std::int64_t chunk = range.first; chunk < range.last; ++chunk) {
      A* sums = nullptr;
      if (wants_grads_) {
        sums = static_cast<A*>(args_.workspace) + chunk * grads_of(args_.kind) * cols_;
      }
      run_rows(args_.rows * chunk / chunks, args_.rows * (chunk + 1) / chunks, sums);
    }
  }

 private:
  // The instance that takes every row, also those that the others cannot.
  using General = Backward<kLanes, Norm, A, A>;

  void run_rows(std::int64_t first_row, std::int64_t last_row, A* sums) {
    const std::int64_t tile_rows =
        std::max<std::int64_t>(kAtOnce, rows_of_tile(args_.rows, cols_, args_.dtype));
    if (wants_grads_ || kNarrow) {
      begin_grads(wants_grads_ ? sums : unread_);
    }
    for (std::int64_t row = first_row; row < last_row; row += tile_rows) {
      run_some({row, std::min(tile_rows, last_row - row), 0, cols_});
    }
    if (wants_grads_) {
      end_grads();
    }
  }
  void begin_grads(A* sums) {
    const int count = grads_of(args_.kind);
    grads_ = {sums, sums + (count - 1) * cols_};
    std::fill_n(sums, count * cols_, A(0));
    std::fill_n(tail_weight_, kLanes, A(0));
    std::fill_n(tail_bias_, kLanes, A(0));
  }
  void end_grads() {
    const ParameterGrads<A> last = grads_.from(cols_ - kLanes);
    add_tail<kLanes>(tail_weight_, last.weight);
    if (Norm::kHasBias) {
      add_tail<kLanes>(tail_bias_, last.bias);
    }
  }

  void run_some(const Tile& tile) {
    if constexpr (!std::is_same_v<Backward, General>) {
      if (has_tiny_rstd(tile)) {
        run_general(tile);
        return;
      }
    }
    if constexpr (kNarrow) {
      if (wants_dx_ && !args_.x_is_output && !has_tiny_rstd(tile)) {
        run_narrow(tile);
        return;
      }
    }
    run_tile(tile);
  }
  __attribute__((noinline)) void run_general(const Tile& tile) {
    General general(args_);
    general.grads_ = grads_;
    std::copy_n(tail_weight_, kLanes, general.tail_weight_);
    std::copy_n(tail_bias_, kLanes, general.tail_bias_);
    general.run_some(tile);
    std::copy_n(general.tail_weight_, kLanes, tail_weight_);
    std::copy_n(general.tail_bias_, kLanes, tail_bias_);
  }

  SavedStats<A> saved(std::int64_t row) const {
    return Norm::saved(static_cast<const A*>(args_.stats), row, args_.rows);
  }
  // Whether the values of a row of the tile are so large that x - mean might overflow.
  bool has_tiny_rstd(const Tile& tile) const {
    const A* const rstd = static_cast<const A*>(args_.stats) + (Norm::kStats - 1) * args_.rows;
    return has_tiny(rstd + tile.row, tile.rows);
  }
  // Whether the rows are turned into x̂ before the passes over them.
  bool holds_xhat(const Tile& tile) const {
    return std::is_same_v<Backward, General> && (args_.x_is_output || has_tiny_rstd(tile));
  }
  RowIn<X, A> row_in(const X* x, const X* dy, std::int64_t row, bool is_xhat) const {
    const SavedStats<A> stats = saved(row);
    return {x, dy, is_xhat ? A(0) : stats.mean, is_xhat ? A(1) : stats.rstd};
  }

  // Rows of 16 bits are read in place; run_backward() checks that they can be.
  __attribute__((noinline)) View<X> read_x(const Tile& tile, bool is_xhat) {
    if constexpr (!std::is_same_v<X, A>) {
      return view_tile<X>(args_.x, tile);
    } else if (!is_xhat) {
      return read_tile(args_.x, tile, x_, kNarrow);
    } else {
      copy_tile(args_.x, tile, x_);
      for (std::int64_t r = 0; r < tile.rows; ++r) {
        A* const row = x_ + r * tile.cols;
        if (args_.x_is_output) {
          recover_xhat(weight_.from(tile.col, tile.cols), bias_.from(tile.col, tile.cols),
                       tile.cols, row);
        } else {
          normalize_row<Norm>(saved(tile.row + r).normalizer(), tile.cols, row);
        }
      }
      return {x_, tile.cols};
    }
  }
  __attribute__((noinline)) View<X> read_dy(const Tile& tile) {
    if constexpr (!std::is_same_v<X, A>) {
      return view_tile<X>(args_.grad_output, tile);
    } else if (!drops_output_) {
      return read_tile(args_.grad_output, tile, dy_, kNarrow);
    } else {
      copy_tile(args_.grad_output, tile, dy_);
      drop_tile(args_.dropout, tile, dy_);
      return {dy_, tile.cols};
    }
  }
  View<X> read_dsum(const Tile& tile) {
    if (args_.grad_sum.data == nullptr) {
      return {};
    }
    if constexpr (!std::is_same_v<X, A>) {
      return view_tile<X>(args_.grad_sum, tile);
    } else {
      return read_tile(args_.grad_sum, tile, dsum_, kNarrow);
    }
  }

  // Calls function(met), where met turns x̂ into the value that the gradient of the weight uses.
  template <typename Function>
  void with_met(const Function& function) {
    if (wants_grads_) {
      with_rounding<X>(args_.rounding, args_.grad_input.dtype, function);
    } else if constexpr (kNarrow) {  // summed, and not read
      function(Exact());
    } else {
      function(Unwanted());
    }
  }

  template <typename Met, int kRows>
  FUSED_OP_CPU_INLINE void add(const RowIn<X, A> (&rows)[kRows], std::int64_t col,
                               std::int64_t cols, PullbackTotals* totals) {
    const ParameterGrads<A> tail{tail_weight_, tail_bias_};
    constexpr bool kWanted = !std::is_same_v<Met, Unwanted>;
    add_pullback<kRows, kLanes, Norm, Met>(rows, weight_.from(col, cols), cols, totals,
                                           kWanted ? grads_.from(col) : grads_, tail);
  }
  A inverse_divisor() const { return A(1) / static_cast<A>(divisor(args_.kind, cols_)); }
  Pullback<Norm, A> pullback(const PullbackTotals& totals, std::int64_t row) const {
    const PullbackSums<A> sums{static_cast<A>(totals.wdy_xhat), static_cast<A>(totals.wdy)};
    return {sums, saved(row).normalizer(), inverse_divisor()};
  }

  X* dx_of(const Tile& tile) const {
    if constexpr (std::is_same_v<X, A>) {
      if (!is_direct_) {
        return dx_;
      }
    }
    return static_cast<X*>(args_.grad_input.data) + tile.row * cols_ + tile.col;
  }
  void finish(const Tile& tile) {
    if (is_direct_) {
      return;
    }
    write_tile(dx_, args_.grad_residual.data, args_.grad_residual.dtype, tile, cols_);
    if (args_.drops_input) {
      drop_tile(args_.dropout, tile, dx_);
    }
    write_tile(dx_, args_.grad_input.data, args_.grad_input.dtype, tile, cols_);
  }

  // The two passes over the rows of a tile. Not inlined: their copies in run_tile() would cost
  // compile time.
  template <typename Met>
  __attribute__((noinline)) void add_up(const Tile& tile, const View<X>& x, const View<X>& dy,
                                        bool is_xhat, PullbackTotals* totals) {
    const auto row = [&](std::int64_t r) {
      return row_in(x.row(r), dy.row(r), tile.row + r, is_xhat);
    };
    std::int64_t r = 0;
    for (; kAtOnce == 2 && r + 2 <= tile.rows; r += 2) {
      const RowIn<X, A> pair[2] = {row(r), row(r + 1)};
      add<Met>(pair, tile.col, tile.cols, totals + r);
    }
    for (; r < tile.rows; ++r) {
      const RowIn<X, A> one[1] = {row(r)};
      add<Met>(one, tile.col, tile.cols, totals + r);
    }
  }
  void add_bias(const Tile& tile, const View<X>& dy) {
    if (!Norm::kHasBias && sums_bias_) {
      add_grads_of_bias<kLanes>(dy, tile.rows, tile.cols, grads_.bias + tile.col);
    }
  }
  // What is read after a tile lies below it.
  template <bool kAdds>
  __attribute__((noinline)) void pull_back(const Tile& tile, const View<X>& x, const View<X>& dy,
                                           const View<X>& dsum, bool is_xhat,
                                           const PullbackTotals* totals) {
    const A* const weight = weight_.from(tile.col, tile.cols);
    X* const dx = dx_of(tile);
    const std::int64_t stride = is_direct_ ? cols_ : tile.cols;
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      const X* const addend = kAdds ? dsum.row(r) : nullptr;
      const RowIn<X, A> in = row_in(x.row(r), dy.row(r), tile.row + r, is_xhat);
      const RowIn<X, A> next{x.row(r + tile.rows), dy.row(r + tile.rows), A(0), A(0)};
      // Of a long row the next one lies too far ahead.
      const X* const next_dx = dx + (tile.cols < cols_ ? r : r + tile.rows) * stride;
      write_dx<kLanes, Norm, kAdds>(in, weight, addend, pullback(totals[r], tile.row + r),
                                    tile.cols, dx + r * stride, next, next_dx);
    }
  }
  __attribute__((noinline)) void write(const Tile& tile, const View<X>& x, const View<X>& dy,
                                       bool is_xhat, const PullbackTotals* totals) {
    const View<X> dsum = read_dsum(tile);
    dsum.first == nullptr ? pull_back<false>(tile, x, dy, dsum, is_xhat, totals)
                          : pull_back<true>(tile, x, dy, dsum, is_xhat, totals);
    finish(tile);
  }

  // Computes long rows in parts, which are read again for dx.
  __attribute__((noinline)) void run_tile(const Tile& tile) {
    const bool is_xhat = holds_xhat(tile);
    const bool in_parts = kMayBeLong && is_long(cols_);
    PullbackTotals totals[kTileRows];
    std::fill_n(totals, tile.rows, PullbackTotals{0, 0});
    for (std::int64_t col = 0, count = 0; col < cols_; col += count) {
      count = in_parts ? piece(col, cols_, kTileCols) : cols_;
      const Tile part{tile.row, tile.rows, col, count};
      const View<X> x = read_x(part, is_xhat);
      const View<X> dy = read_dy(part);
      with_met([&]<typename Met>(Met) { add_up<Met>(part, x, dy, is_xhat, totals); });
      add_bias(part, dy);
      if (!in_parts && wants_dx_) {
        write(part, x, dy, is_xhat, totals);
      }
    }
    if (in_parts && wants_dx_) {
      write_long(tile, is_xhat, totals);
    }
  }
  void write_long(const Tile& tile, bool is_xhat, const PullbackTotals* totals) {
    for (std::int64_t col = 0, count = 0; col < cols_; col += count) {
      count = piece(col, cols_, kTileCols);
      const Tile part{tile.row, tile.rows, col, count};
      const View<X> x = read_x(part, is_xhat);
      const View<X> dy = read_dy(part);
      write(part, x, dy, is_xhat, totals);
    }
  }

  // Each row in a lane of its own.
  void run_narrow(const Tile& tile) {
    const A* const stats = static_cast<const A*>(args_.stats);
    const A* const rstd = stats + (Norm::kStats - 1) * args_.rows + tile.row;
    const A* const mean = stats + tile.row;  // not used by RMSNorm
    const A* const x = read_x(tile, false).first;
    const A* const dy = read_dy(tile).first;
    const A* const dsum = read_dsum(tile).first;
    const A* const weight = weight_.from(0, cols_);
    A* const dx = dx_of(tile);
    with_met([&]<typename Met>(Met) {
      with_narrow(cols_, [&]<int kCols>() {
        backward_narrow<kCols, Norm, Met>(x, dy, weight, mean, rstd, tile.rows, inverse_divisor(),
                                          dx, grads_);
      });
    });
    if (!Norm::kHasBias && sums_bias_) {
      with_narrow(
          cols_, [&]<int kCols>() { add_narrow_grads_of_bias<kCols>(dy, tile.rows, grads_.bias); });
    }
    if (dsum != nullptr) {
      add_to_rows(dsum, tile.rows * cols_, dx);
    }
    finish(tile);
  }

  template <int, typename, typename, typename>
  friend class Backward;

  const NormBackwardArgs& args_;
  const std::int64_t cols_;
  const bool drops_output_;
  const bool wants_dx_;
  const bool wants_grads_;
  const bool sums_bias_;  // in a pass of its own: of an RMS norm
  const bool is_direct_;  // dx is written as it is computed
  Parameter<A> weight_, bias_;
  ParameterGrads<A> grads_;  // of the chunk
  A tail_weight_[kLanes], tail_bias_[kLanes];
  A unread_[kNarrow ? 6 : 1];
  A* const x_ = tile_buffer<A>(0);
  A* const dy_ = tile_buffer<A>(1);
  A* const dsum_ = tile_buffer<A>(2);
  A* const dx_ = tile_buffer<A>(3);
};

inline void run_backward(const NormBackwardArgs& args, const BackwardRange& range) {
  const auto is_ready = [&](const ConstRows& rows) {
    return rows.data == nullptr || lies_ready(rows, args.dtype);
  };
  const bool wants_dx = args.grad_input.data != nullptr || args.grad_residual.data != nullptr;
  const bool converts = !is_ready(args.x) || !is_ready(args.grad_output) ||
                        !is_ready(args.grad_sum) || args.x_is_output || args.dropout.active ||
                        args.grad_residual.data != nullptr ||
                        (wants_dx && args.grad_input.dtype != args.dtype);
  const auto run = [&]<int kLanes, typename Norm, typename A>() {
    const auto run_elements = [&]<typename X>() {
      Backward<(kLanes > 8 ? kLanes / 2 : kLanes), Norm, A, X>(args).run(range);
    };
    with_elements<kLanes, A>(converts ? kDTypeOf<A> : args.dtype, run_elements);
  };
  with_types(args.kind, args.dtype, args.cols, run);
}

inline void backward_rows(const NormBackwardArgs& args, std::int64_t first_chunk,
                          std::int64_t last_chunk) {
  run_backward(args, {first_chunk, last_chunk, true});
}

// Adds up the partial sums of the chunks, in their order.
template <typename A>
void add_chunks(const NormBackwardArgs& args, std::int64_t chunks, int grad, void* target,
                std::int64_t first_col, std::int64_t last_col) {
  constexpr std::int64_t kCols = 64;
  const std::int64_t stride = grads_of(args.kind) * args.cols;
  const A* const partials = static_cast<const A*>(args.workspace) + grad * args.cols;
  if (chunks == 1 && !args.add_grads) {
    write_elements(partials + first_col, target, args.param_dtype, first_col, last_col - first_col);
    return;
  }
  for (std::int64_t col = first_col; col < last_col; col += kCols) {
    const std::int64_t count = std::min(kCols, last_col - col);
    double totals[kCols] = {};
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
      const A* const part = partials + chunk * stride + col;
#pragma omp simd
      for (std::int64_t j = 0; j < count; ++j) {
        totals[j] += static_cast<double>(part[j]);
      }
    }
    A sums[kCols] = {};
    write<A>(totals, sums, 0, count);
    if (args.add_grads) {
#pragma omp simd
      for (std::int64_t j = 0; j < count; ++j) {
        static_cast<float*>(target)[col + j] += static_cast<float>(sums[j]);
      }
    } else {
      write_elements(sums, target, args.param_dtype, col, count);
    }
  }
}

inline void add_chunks(const NormBackwardArgs& args, std::int64_t chunks, std::int64_t first_col,
                       std::int64_t last_col) {
  void* const targets[2] = {args.grad_weight, args.grad_bias};
  for (int grad = 0; grad < 2; ++grad) {
    if (targets[grad] == nullptr) {
      continue;
    }
    with_accumulators(args.dtype, [&]<typename A>() {
      add_chunks<A>(args, chunks, grad, targets[grad], first_col, last_col);
    });
  }
}

inline void backward_columns(const NormBackwardArgs& args, std::int64_t first_col,
                             std::int64_t last_col) {
  add_chunks(args, norm_backward_chunks(args), first_col, last_col);
}

}  // namespace fused_op::cpu::FUSED_OP_CPU_LEVEL
