// Backward in one pass over the rows, in chunks of them with partial sums of the parameters'
// gradients. Included by a level alone: level.h.
#pragma once

#include "cpu/level.h"
#include "cpu/pullback.h"
#include "cpu/sums.h"
#include "cpu/tiles.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

template <int kLanes, int kCols, typename Norm, typename A>
class Backward {
 public:
  explicit Backward(const NormBackwardArgs& call)
      : args_(call),
        cols_(call.cols),
        drops_output_(call.dropout.active && !call.drops_input),
        wants_dx_(call.grad_input.data != nullptr || call.grad_residual.data != nullptr),
        wants_grads_(call.grad_weight != nullptr || call.grad_bias != nullptr),
        is_direct_(call.grad_input.data != nullptr && call.grad_input.dtype == kDTypeOf<A> &&
                   !call.drops_input && call.grad_residual.data == nullptr),
        weight_(call.weight, call.param_dtype, cols_, A(1)),
        bias_(call.bias, call.param_dtype, call.x_is_output ? cols_ : 0, A(0)) {}

  void run(std::int64_t first_chunk, std::int64_t last_chunk) {
    const std::int64_t chunks = norm_backward_chunks(args_);
    const std::int64_t tile_rows = std::max<std::int64_t>(2, rows_of_tile(cols_));
    for (std::int64_t chunk = first_chunk; chunk < last_chunk; ++chunk) {
      if (wants_grads_) {
        begin_grads(static_cast<A*>(args_.workspace) + chunk * Norm::kGrads * cols_);
      }
      const std::int64_t last_row = args_.rows * (chunk + 1) / chunks;
      for (std::int64_t row = args_.rows * chunk / chunks; row < last_row; row += tile_rows) {
        const Tile tile{row, std::min(tile_rows, last_row - row), 0, cols_};
        if (!is_long(cols_)) {
          run_tile(tile);
        } else if (tile.rows == 2) {
          run_long_rows<2>(row);
        } else {
          run_long_rows<1>(row);
        }
      }
      if (wants_grads_) {
        end_grads();
      }
    }
  }

 private:
  void begin_grads(A* sums) {
    grads_ = {sums, Norm::kCentered ? sums + cols_ : sums};
    std::fill_n(sums, Norm::kGrads * cols_, A(0));
    std::fill_n(tail_weight_, kLanes, A(0));
    std::fill_n(tail_bias_, kLanes, A(0));
  }
  void end_grads() {
    const ParameterGrads<A> last = grads_.from(cols_ - kLanes);
    for (int j = 0; j < kLanes; ++j) {  // what was skipped is 0
      last.weight[j] += tail_weight_[j];
      if (Norm::kCentered) {
        last.bias[j] += tail_bias_[j];
      }
    }
  }

  Normalizer<A> saved(std::int64_t row) const {
    const Normalizer<A> found =
        Norm::saved(static_cast<const A*>(args_.stats), row, args_.rows).normalizer();
    return {found.scale, found.mean, A(-0.0), found.rstd};
  }
  // x̂ itself is read where x is the output.
  RowIn<A> row_in(const A* x, const A* dy, const Normalizer<A>& normalizer) const {
    return {x, dy, args_.x_is_output ? plain_normalizer(A(0), A(1)) : normalizer};
  }

  View<A> read_x(const Tile& tile) {
    if (!args_.x_is_output) {
      return read_tile(args_.x, tile, x_, kCols > 0);
    }
    copy_tile(args_.x, tile, x_);
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      recover_xhat(weight_.values() + tile.col, bias_.values() + tile.col, tile.cols,
                   x_ + r * tile.cols);
    }
    return {x_, tile.cols};
  }
  View<A> read_dy(const Tile& tile) {
    if (!drops_output_) {
      return read_tile(args_.grad_output, tile, dy_, kCols > 0);
    }
    copy_tile(args_.grad_output, tile, dy_);
    drop_tile(args_.dropout, tile, dy_);
    return {dy_, tile.cols};
  }

  template <int kRows>
  void add(RowIn<A> (&rows)[kRows], std::int64_t col, std::int64_t cols, PullbackTotals* totals) {
    bool all_plain = true;
    for (const RowIn<A>& row : rows) {
      all_plain = all_plain && is_plain(row.normalizer);
    }
    if (all_plain) {
      for (RowIn<A>& row : rows) {
        row.normalizer = plain_normalizer(row.normalizer.mean, row.normalizer.rstd);
      }
      add_some<kRows>(rows, col, cols, totals);
    } else {
      add_some<kRows>(rows, col, cols, totals);
    }
  }
  template <int kRows>
  FUSED_OP_CPU_INLINE void add_some(const RowIn<A> (&rows)[kRows], std::int64_t col,
                                    std::int64_t cols, PullbackTotals* totals) {
    const A* const weight = weight_.values() + col;
    const ParameterGrads<A> tail{tail_weight_, tail_bias_};
    if (wants_grads_) {
      add_pullback<kRows, kLanes, Norm, true>(rows, weight, cols, totals, grads_.from(col), tail);
    } else {
      add_pullback<kRows, kLanes, Norm, false>(rows, weight, cols, totals, grads_, tail);
    }
  }
  Pullback<Norm, A> pullback(const PullbackTotals& totals, const Normalizer<A>& normalizer) const {
    const PullbackSums<A> sums{static_cast<A>(totals.wdy_xhat), static_cast<A>(totals.wdy)};
    return {sums, normalizer, A(1) / static_cast<A>(cols_)};
  }

  A* dx_of(const Tile& tile) const {
    return is_direct_ ? static_cast<A*>(args_.grad_input.data) + tile.row * cols_ + tile.col : dx_;
  }
  void write(const RowIn<A>& row, const A* dsum, std::int64_t col, std::int64_t cols,
             const Pullback<Norm, A>& pulled, A* dx, const RowIn<A>& next) {
    const A* const weight = weight_.values() + col;
    if (dsum != nullptr) {
      write_dx<kLanes, Norm, true>(row.x, row.dy, weight, dsum, row.normalizer, pulled, cols, dx,
                                   next);
    } else {
      write_dx<kLanes, Norm, false>(row.x, row.dy, weight, dsum, row.normalizer, pulled, cols, dx,
                                    next);
    }
  }
  View<A> read_dsum(const Tile& tile) {
    return args_.grad_sum.data == nullptr ? View<A>()
                                          : read_tile(args_.grad_sum, tile, dsum_, kCols > 0);
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

  void run_tile(const Tile& tile) {
    const View<A> x = read_x(tile);
    const View<A> dy = read_dy(tile);
    const View<A> dsum = wants_dx_ ? read_dsum(tile) : View<A>();
    A* const dx = dx_of(tile);
    if (kCols > 0 && run_narrow(tile, x.first, dy.first, dsum.first, dx)) {
      finish(tile);
      return;
    }
    Normalizer<A> normalizers[kTileRows];
    PullbackTotals totals[kTileRows];
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      normalizers[r] = saved(tile.row + r);
    }
    const auto row = [&](std::int64_t r) { return row_in(x.row(r), dy.row(r), normalizers[r]); };
    std::int64_t r = 0;
    for (; r + 2 <= tile.rows; r += 2) {
      RowIn<A> pair[2] = {row(r), row(r + 1)};
      add<2>(pair, 0, cols_, totals + r);
    }
    if (r < tile.rows) {
      RowIn<A> last[1] = {row(r)};
      add<1>(last, 0, cols_, totals + r);
    }
    if (wants_dx_) {
      for (r = 0; r < tile.rows; ++r) {
        const A* const addend = dsum.first == nullptr ? nullptr : dsum.row(r);
        write(row(r), addend, 0, cols_, pullback(totals[r], normalizers[r]), dx + r * cols_,
              {x.row(r + tile.rows), dy.row(r + tile.rows), {}});
      }
      finish(tile);
    }
  }

  // False where it does not fit: rows with a scale, or of which no dx is wanted.
  bool run_narrow(const Tile& tile, const A* x, const A* dy, const A* dsum, A* dx) {
    const A* const stats = static_cast<const A*>(args_.stats);
    const A* const rstd = stats + (Norm::kStats - 1) * args_.rows + tile.row;
    bool is_plain = wants_dx_ && !args_.x_is_output;
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      is_plain = is_plain && !(rstd[r] < Limits<A>::kTinyRstd);
    }
    if (!is_plain) {
      return false;
    }
    const A* const mean = stats + tile.row;  // of RMSNorm never used
    const A* const weight = weight_.values();
    constexpr int kNarrow = kCols > 0 ? kCols : 1;
    if (wants_grads_ && dsum == nullptr) {
      backward_narrow<kNarrow, Norm, true, false>(x, dy, weight, dsum, mean, rstd, tile.rows, dx,
                                                  grads_);
    } else if (wants_grads_) {
      backward_narrow<kNarrow, Norm, true, true>(x, dy, weight, dsum, mean, rstd, tile.rows, dx,
                                                 grads_);
    } else if (dsum == nullptr) {
      backward_narrow<kNarrow, Norm, false, false>(x, dy, weight, dsum, mean, rstd, tile.rows, dx,
                                                   grads_);
    } else {
      backward_narrow<kNarrow, Norm, false, true>(x, dy, weight, dsum, mean, rstd, tile.rows, dx,
                                                  grads_);
    }
    return true;
  }

  // In parts, which are read again for dx.
  template <int kRows>
  void run_long_rows(std::int64_t number) {
    Normalizer<A> normalizers[kRows];
    PullbackTotals totals[kRows];
    for (int r = 0; r < kRows; ++r) {
      normalizers[r] = saved(number + r);
    }
    for (std::int64_t col = 0, count = 0; col < cols_; col += count) {
      count = piece(col, cols_, kTileCols);
      const Tile part{number, kRows, col, count};
      const View<A> x = read_x(part);
      const View<A> dy = read_dy(part);
      RowIn<A> rows[kRows];
      for (int r = 0; r < kRows; ++r) {
        rows[r] = row_in(x.row(r), dy.row(r), normalizers[r]);
      }
      add<kRows>(rows, col, count, totals);
    }
    for (int r = 0; wants_dx_ && r < kRows; ++r) {
      const Pullback<Norm, A> pulled = pullback(totals[r], normalizers[r]);
      for (std::int64_t col = 0, count = 0; col < cols_; col += count) {
        count = piece(col, cols_, kTileCols);
        const Tile part{number + r, 1, col, count};
        const View<A> x = read_x(part);
        const View<A> dy = read_dy(part);
        const RowIn<A> row = row_in(x.first, dy.first, normalizers[r]);
        const RowIn<A> next = row_in(x.row(kRows), dy.row(kRows), normalizers[r]);
        write(row, read_dsum(part).first, col, count, pulled, dx_of(part), next);
        finish(part);
      }
    }
  }

  const NormBackwardArgs& args_;
  const std::int64_t cols_;
  const bool drops_output_;
  const bool wants_dx_;
  const bool wants_grads_;
  const bool is_direct_;  // dx is written as it is computed
  const Parameter<A> weight_, bias_;
  ParameterGrads<A> grads_;  // of the chunk
  A tail_weight_[kLanes], tail_bias_[kLanes];
  A* const x_ = tile_buffer<A>(0);
  A* const dy_ = tile_buffer<A>(1);
  A* const dsum_ = tile_buffer<A>(2);
  A* const dx_ = tile_buffer<A>(3);
};

inline void backward_rows(const NormBackwardArgs& args, std::int64_t first_chunk,
                          std::int64_t last_chunk) {
  const auto run = [&]<int kLanes, int kCols, typename Norm, typename A>() {
    Backward<(kLanes > 8 ? kLanes / 2 : kLanes), kCols, Norm, A>(args).run(first_chunk, last_chunk);
  };
  with_types(args.kind, args.dtype, args.cols, run);
}

// Adds the partial sums of the chunks, in their order.
template <typename A>
void add_chunks(const NormBackwardArgs& args, int grad, void* target, std::int64_t first_col,
                std::int64_t last_col) {
  constexpr std::int64_t kCols = 64;
  const std::int64_t chunks = norm_backward_chunks(args);
  const std::int64_t stride = (args.kind == NormKind::kLayerNorm ? 2 : 1) * args.cols;
  const A* const partials = static_cast<const A*>(args.workspace) + grad * args.cols;
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
    A rounded[kCols];
    convert(totals, count, rounded);
    if (args.add_grads) {
#pragma omp simd
      for (std::int64_t j = 0; j < count; ++j) {
        static_cast<float*>(target)[col + j] += static_cast<float>(rounded[j]);
      }
    } else {
      write_elements(rounded, target, args.param_dtype, col, count);
    }
  }
}

inline void backward_columns(const NormBackwardArgs& args, std::int64_t first_col,
                             std::int64_t last_col) {
  void* const targets[2] = {args.grad_weight, args.grad_bias};
  for (int grad = 0; grad < 2; ++grad) {
    if (targets[grad] == nullptr) {
      continue;
    }
    if (args.dtype == DType::kFloat64) {
      add_chunks<double>(args, grad, targets[grad], first_col, last_col);
    } else {
      add_chunks<float>(args, grad, targets[grad], first_col, last_col);
    }
  }
}

}  // namespace fused_op::cpu::FUSED_OP_CPU_LEVEL
