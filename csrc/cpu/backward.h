// Backward in one pass over the rows, in chunks of them with partial sums of the parameters'
// gradients. Included by a level alone: level.h.
#pragma once

#include "cpu/level.h"
#include "cpu/sums.h"
#include "cpu/tiles.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

// The sums of a part of a row, by lanes, and what it adds to the gradients of the parameters.
template <int kLanes, typename Norm, bool kGrads, typename A>
inline void pullback_pack(const A* __restrict x, const A* __restrict dy, const A* __restrict weight,
                          const Normalizer<A> normalizer, int skip, A (&wdy_xhat)[kLanes],
                          A (&wdy)[kLanes], A* __restrict dweight, A* __restrict dbias) {
  for (int j = 0; j < kLanes; ++j) {
    const A xhat = j >= skip ? Norm::normalized(x[j], normalizer) : A(0);
    const A grad = j >= skip ? dy[j] : A(0);
    wdy_xhat[j] += weight[j] * grad * xhat;
    if (Norm::kCentered) {
      wdy[j] += weight[j] * grad;
    }
    if (kGrads) {
      dweight[j] += grad * xhat;
      if (Norm::kCentered) {
        dbias[j] += grad;
      }
    }
  }
}

struct PullbackTotals {
  double wdy_xhat = 0;
  double wdy = 0;
};

template <int kLanes, typename Norm, bool kGrads, typename A>
inline void add_pullback(const A* x, const A* dy, const A* weight, const Normalizer<A>& normalizer,
                         std::int64_t cols, PullbackTotals& totals, A* dweight, A* dbias) {
  for (std::int64_t first = 0, count = 0; first < cols; first += count) {
    count = piece(first, cols, kSumCols);
    A wdy_xhat[kLanes] = {};
    A wdy[kLanes] = {};
    const std::int64_t last = first + count;
    std::int64_t col = first;
    for (; col + kLanes <= last; col += kLanes) {
      pullback_pack<kLanes, Norm, kGrads>(x + col, dy + col, weight + col, normalizer, 0, wdy_xhat,
                                          wdy, dweight + col, dbias + col);
    }
    if (col < last) {
      const int skip = skip_of<kLanes>(col, last);
      col = last - kLanes;
      pullback_pack<kLanes, Norm, kGrads>(x + col, dy + col, weight + col, normalizer, skip,
                                          wdy_xhat, wdy, dweight + col, dbias + col);
    }
    totals.wdy_xhat += fold(wdy_xhat);
    totals.wdy += fold(wdy);
  }
}

template <int kLanes, typename Norm, bool kAdds, typename A>
inline void dx_pack(const A* __restrict x, const A* __restrict dy, const A* __restrict weight,
                    const A* __restrict dsum, const Normalizer<A> normalizer,
                    const Pullback<Norm, A> pullback, A* __restrict dx) {
  for (int j = 0; j < kLanes; ++j) {
    const A grad = pullback(weight[j] * dy[j], Norm::normalized(x[j], normalizer));
    dx[j] = kAdds ? grad + dsum[j] : grad;
  }
}

template <int kLanes, typename Norm, bool kAdds, typename A>
inline void write_dx(const A* x, const A* dy, const A* weight, const A* dsum,
                     const Normalizer<A>& normalizer, const Pullback<Norm, A>& pullback,
                     std::int64_t cols, A* dx) {
  for (std::int64_t col = 0; col < cols; col += kLanes) {
    const std::int64_t at = std::min(col, cols - kLanes);
    dx_pack<kLanes, Norm, kAdds>(x + at, dy + at, weight + at, kAdds ? dsum + at : nullptr,
                                 normalizer, pullback, dx + at);
  }
}

// x̂ of a row that holds the output.
template <typename A>
void recover_xhat(const A* __restrict weight, const A* __restrict bias, std::int64_t cols,
                  A* __restrict x) {
  for (std::int64_t col = 0; col < cols; ++col) {
    const A smallest = std::copysign(static_cast<A>(kSmallestWeight), weight[col]);
    const bool is_small = std::abs(weight[col]) < static_cast<A>(kSmallestWeight);
    x[col] = (x[col] - bias[col]) / (is_small ? smallest : weight[col]);
  }
}

template <int kLanes, typename Norm, typename A>
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
    const std::int64_t tile_rows = std::max<std::int64_t>(1, kTileElements / cols_);
    for (std::int64_t chunk = first_chunk; chunk < last_chunk; ++chunk) {
      if (wants_grads_) {
        dweight_ = static_cast<A*>(args_.workspace) + chunk * Norm::kGrads * cols_;
        dbias_ = Norm::kCentered ? dweight_ + cols_ : dweight_;
        std::fill_n(dweight_, Norm::kGrads * cols_, A(0));
      }
      const std::int64_t last_row = args_.rows * (chunk + 1) / chunks;
      for (std::int64_t row = args_.rows * chunk / chunks; row < last_row; row += tile_rows) {
        if (is_long(cols_)) {
          run_long_row(row);
        } else {
          run_tile({row, std::min(tile_rows, last_row - row), 0, cols_});
        }
      }
    }
  }

 private:
  struct Row {
    Normalizer<A> normalizer;  // of what is read
    A rstd;
  };
  Row row_of(std::int64_t row) const {
    const auto saved = Norm::saved(static_cast<const A*>(args_.stats), row, args_.rows);
    const Normalizer<A> normalizer = saved.normalizer();
    if (args_.x_is_output) {  // x̂ itself is read then
      return {{A(1), A(0), A(0), A(1)}, normalizer.true_rstd()};
    }
    return {normalizer, normalizer.true_rstd()};
  }

  View<A> read_x(const Tile& tile) {
    if (!args_.x_is_output) {
      return read_tile(args_.x, tile, x_);
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
      return read_tile(args_.grad_output, tile, dy_);
    }
    copy_tile(args_.grad_output, tile, dy_);
    drop_tile(args_.dropout, tile, dy_);
    return {dy_, tile.cols};
  }

  void add(const A* x, const A* dy, std::int64_t col, std::int64_t cols, const Row& row,
           PullbackTotals& totals) {
    const A* const weight = weight_.values() + col;
    if (wants_grads_) {
      add_pullback<kLanes, Norm, true>(x, dy, weight, row.normalizer, cols, totals, dweight_ + col,
                                       dbias_ + col);
    } else {
      add_pullback<kLanes, Norm, false>(x, dy, weight, row.normalizer, cols, totals, dweight_,
                                        dbias_);
    }
  }
  Pullback<Norm, A> pullback(const PullbackTotals& totals, const Row& row) const {
    const PullbackSums<A> sums{static_cast<A>(totals.wdy_xhat), static_cast<A>(totals.wdy)};
    const Normalizer<A> of_input{A(1), A(0), A(0), row.rstd};
    return {sums, of_input, A(1) / static_cast<A>(cols_)};
  }

  A* dx_of(const Tile& tile) const {
    return is_direct_ ? static_cast<A*>(args_.grad_input.data) + tile.row * cols_ + tile.col : dx_;
  }
  void write(const A* x, const A* dy, const A* dsum, std::int64_t col, std::int64_t cols,
             const Row& row, const Pullback<Norm, A>& pulled, A* dx) {
    const A* const weight = weight_.values() + col;
    if (dsum != nullptr) {
      write_dx<kLanes, Norm, true>(x, dy, weight, dsum, row.normalizer, pulled, cols, dx);
    } else {
      write_dx<kLanes, Norm, false>(x, dy, weight, dsum, row.normalizer, pulled, cols, dx);
    }
  }
  View<A> read_dsum(const Tile& tile) {
    return args_.grad_sum.data == nullptr ? View<A>() : read_tile(args_.grad_sum, tile, dsum_);
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
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      const Row row = row_of(tile.row + r);
      PullbackTotals totals;
      add(x.row(r), dy.row(r), 0, cols_, row, totals);
      if (wants_dx_) {
        const A* const addend = dsum.first == nullptr ? nullptr : dsum.row(r);
        write(x.row(r), dy.row(r), addend, 0, cols_, row, pullback(totals, row), dx + r * cols_);
      }
    }
    if (wants_dx_) {
      finish(tile);
    }
  }

  // In parts, which are read again for dx.
  void run_long_row(std::int64_t number) {
    const Row row = row_of(number);
    PullbackTotals totals;
    for (std::int64_t col = 0, count = 0; col < cols_; col += count) {
      count = piece(col, cols_, kTileCols);
      const Tile part{number, 1, col, count};
      add(read_x(part).first, read_dy(part).first, col, count, row, totals);
    }
    const Pullback<Norm, A> pulled = pullback(totals, row);
    for (std::int64_t col = 0, count = 0; wants_dx_ && col < cols_; col += count) {
      count = piece(col, cols_, kTileCols);
      const Tile part{number, 1, col, count};
      write(read_x(part).first, read_dy(part).first, read_dsum(part).first, col, count, row, pulled,
            dx_of(part));
      finish(part);
    }
  }

  const NormBackwardArgs& args_;
  const std::int64_t cols_;
  const bool drops_output_;
  const bool wants_dx_;
  const bool wants_grads_;
  const bool is_direct_;  // dx is written as it is computed
  const Parameter<A> weight_, bias_;
  A* dweight_ = nullptr;  // of the chunk
  A* dbias_ = nullptr;
  A* const x_ = tile_buffer<A>(0);
  A* const dy_ = tile_buffer<A>(1);
  A* const dsum_ = tile_buffer<A>(2);
  A* const dx_ = tile_buffer<A>(3);
};

inline void backward_rows(const NormBackwardArgs& args, std::int64_t first_chunk,
                          std::int64_t last_chunk) {
  const auto run = [&]<int kLanes, typename Norm, typename A>() {
    Backward<(kLanes > 8 ? kLanes / 2 : kLanes), Norm, A>(args).run(first_chunk, last_chunk);
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
      for (std::int64_t j = 0; j < count; ++j) {
        totals[j] += static_cast<double>(part[j]);
      }
    }
    A rounded[kCols];
    convert(totals, count, rounded);
    if (args.add_grads) {
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
