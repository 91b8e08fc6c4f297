// What backward computes for one row, for two, or for many short ones: the sums, the parameter
// gradients, dx. Included only by a level: level.h.
#pragma once

#include "cpu/level.h"
#include "cpu/sums.h"
#include "cpu/tiles.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

// One row, or a part of it, as backward reads it.
template <typename X, typename A>
struct RowIn {
  const X* x;
  const X* dy;
  Normalizer<A> normalizer;  // of the values in x
};

// Reads in place. Compilers copy 16 bytes at a time, which would stall loads of 32.
template <int kLanes, typename X, typename A>
struct RowPack {
  Pack<kLanes, X, A> x;
  Pack<kLanes, X, A> dy;

  FUSED_OP_CPU_INLINE RowPack(const RowIn<X, A>& row, std::int64_t col)
      : x(row.x + col), dy(row.dy + col) {}
};

struct PullbackTotals {
  double wdy_xhat;
  double wdy;
};

// The parameter gradients, summed over the rows of a chunk.
template <typename A>
struct ParameterGrads {
  A* weight = nullptr;
  A* bias = nullptr;

  ParameterGrads from(std::int64_t col) const { return {weight + col, bias + col}; }
};

// The columns of a pack, for one row or two: their sums by lanes, and what they add to the
// parameter gradients, row after row. Two rows at once halve the traffic of the gradients. `Met` is
// x̂ as the weight multiplied it.
template <int kRows, int kLanes, typename Norm, typename Met, typename X, typename W, typename A>
FUSED_OP_CPU_INLINE void pullback_pack(const RowIn<X, A> (&rows)[kRows],
                                       const Normalizer<A> (&normalizers)[kRows], const W* weight,
                                       std::int64_t col, int skip, A (&wdy_xhat)[kRows][kLanes],
                                       A (&wdy)[kRows][kLanes], const ParameterGrads<A> grads) {
  constexpr bool kGrads = !std::is_same_v<Met, Unwanted>;
  A* const __restrict dweight = grads.weight;
  A* const __restrict dbias = grads.bias;
  const auto packs = [&]<std::size_t... r>(std::index_sequence<r...>) {
    return std::array{RowPack<kLanes, X, A>(rows[r], col)...};
  }(std::make_index_sequence<kRows>());
  const Pack<kLanes, W, A> weights(weight + col);
#pragma omp simd
  for (int j = 0; j < kLanes; ++j) {
    A weight_sum = kGrads ? dweight[j] : A(0);
    A bias_sum = kGrads && Norm::kHasBias ? dbias[j] : A(0);
    for (int r = 0; r < kRows; ++r) {
      const A xhat = j >= skip ? Norm::normalized(packs[r].x[j], normalizers[r]) : A(0);
      const A grad_xhat = j >= skip ? weights[j] * packs[r].dy[j] : A(0);
      const A grad = j >= skip ? packs[r].dy[j] : A(0);
      wdy_xhat[r][j] += grad_xhat * xhat;
      weight_sum += grad * Met()(xhat);
      if (Norm::kCentered) {
        wdy[r][j] += grad_xhat;
      }
      if (Norm::kHasBias) {
        bias_sum += grad;
      }
    }
    if (kGrads) {
      dweight[j] = weight_sum;
      if (Norm::kHasBias) {
        dbias[j] = bias_sum;
      }
    }
  }
}

// `tail` is for the last pack: stores to columns that the previous pack has just written would
// stall the loads of the next row.
template <int kRows, int kLanes, typename Norm, typename Met, bool kPlain, typename X, typename W,
          typename A>
FUSED_OP_CPU_INLINE void add_pullback(const RowIn<X, A> (&rows)[kRows], const W* weight,
                                      std::int64_t cols, PullbackTotals* totals,
                                      const ParameterGrads<A> grads, const ParameterGrads<A> tail) {
  constexpr bool kGrads = !std::is_same_v<Met, Unwanted>;
  Normalizer<A> normalizers[kRows];
  for (int r = 0; r < kRows; ++r) {
    const Normalizer<A>& given = rows[r].normalizer;
    normalizers[r] = kPlain ? plain_normalizer(given.mean, given.rstd) : given;
  }
  for (std::int64_t first = 0, count = 0; first < cols; first += count) {
    count = piece(first, cols, kSumCols);
    A wdy_xhat[kRows][kLanes] = {};
    A wdy[kRows][kLanes] = {};
    const std::int64_t last = first + count;
    std::int64_t col = first;
    for (; col + kLanes <= last; col += kLanes) {
      pullback_pack<kRows, kLanes, Norm, Met>(rows, normalizers, weight, col, 0, wdy_xhat, wdy,
                                              kGrads ? grads.from(col) : grads);
    }
    if (col < last) {
      pullback_pack<kRows, kLanes, Norm, Met>(rows, normalizers, weight, last - kLanes,
                                              skip_of<kLanes>(col, last), wdy_xhat, wdy, tail);
    }
    for (int r = 0; r < kRows; ++r) {
      totals[r].wdy_xhat += fold(wdy_xhat[r]);
      totals[r].wdy += fold(wdy[r]);
    }
  }
}

template <int kLanes, typename Norm, bool kAdds, typename X, typename W, typename A>
FUSED_OP_CPU_INLINE void dx_pack(const RowIn<X, A>& row, const W* weight, const X* dsum,
                                 std::int64_t col, const Normalizer<A> normalizer,
                                 const Pullback<Norm, A> pullback, X* __restrict dx) {
  const Pack<kLanes, X, A> x(row.x + col), dy(row.dy + col);
  const Pack<kLanes, W, A> weights(weight + col);
  const Pack<kAdds ? kLanes : 0, X, A> addends(kAdds ? dsum + col : nullptr);
  const auto result = [&](int j) {
    const A grad = pullback(weights[j] * dy[j], Norm::normalized(x[j], normalizer));
    return kAdds ? grad + addends[j] : grad;
  };
  store_results<kLanes, A>(result, dx + col);
}

template <int kLanes, typename Norm, bool kAdds, typename X, typename W, typename A>
FUSED_OP_CPU_INLINE void write_dx_packs(const RowIn<X, A>& row, const W* weight, const X* dsum,
                                        const Normalizer<A> normalizer,
                                        const Pullback<Norm, A>& pullback, std::int64_t cols, X* dx,
                                        const RowIn<X, A>& next) {
  std::int64_t col = 0;
  for (; col + kLanes <= cols; col += kLanes) {
    prefetch_pack<kLanes>(next.x + col);
    prefetch_pack<kLanes>(next.dy + col);
    dx_pack<kLanes, Norm, kAdds>(row, weight, dsum, col, normalizer, pullback, dx);
  }
  if (col < cols) {
    dx_pack<kLanes, Norm, kAdds>(row, weight, dsum, cols - kLanes, normalizer, pullback, dx);
  }
}

template <int kLanes, typename Norm, bool kAdds, typename X, typename W, typename A>
FUSED_OP_CPU_INLINE void write_dx(const RowIn<X, A>& row, const W* weight, const X* dsum,
                                  const Pullback<Norm, A>& pullback, std::int64_t cols, X* dx,
                                  const RowIn<X, A>& next) {
  const Normalizer<A>& given = row.normalizer;
  if (is_plain(given)) {
    write_dx_packs<kLanes, Norm, kAdds>(row, weight, dsum, plain_normalizer(given.mean, given.rstd),
                                        pullback, cols, dx, next);
  } else {
    write_dx_packs<kLanes, Norm, kAdds>(row, weight, dsum, given, pullback, cols, dx, next);
  }
}

// Rows of kCols columns, each row in a lane of its own. All of them are plain.
template <int kCols, typename Norm, typename Met, bool kAdds, typename A>
void backward_narrow(const A* __restrict x, const A* __restrict dy, const A* __restrict weight,
                     const A* __restrict dsum, const A* __restrict mean, const A* __restrict rstd,
                     std::int64_t rows, A inverse_divisor, A* __restrict dx,
                     const ParameterGrads<A> grads) {
  constexpr int kLanes = 16;
  constexpr bool kGrads = !std::is_same_v<Met, Unwanted>;
  A weight_sums[kCols][kLanes] = {};
  A bias_sums[kCols][kLanes] = {};
  for (std::int64_t row = 0; row < rows; row += kLanes) {
    const auto lanes = static_cast<int>(std::min<std::int64_t>(kLanes, rows - row));
#pragma omp simd
    for (int j = 0; j < lanes; ++j) {
      const std::int64_t at = (row + j) * kCols;
      const Normalizer<A> normalizer = plain_normalizer(mean[row + j], rstd[row + j]);
      PullbackSums<A> sums{A(0), A(0)};
      for (int c = 0; c < kCols; ++c) {
        const A xhat = Norm::normalized(x[at + c], normalizer);
        sums.add(weight[c] * dy[at + c], xhat);
        weight_sums[c][j] += kGrads ? dy[at + c] * Met()(xhat) : A(0);
        bias_sums[c][j] += kGrads && Norm::kHasBias ? dy[at + c] : A(0);
      }
      const Pullback<Norm, A> pullback(sums, normalizer, inverse_divisor);
      for (int c = 0; c < kCols; ++c) {
        const A grad = pullback(weight[c] * dy[at + c], Norm::normalized(x[at + c], normalizer));
        dx[at + c] = kAdds ? grad + dsum[at + c] : grad;
      }
    }
  }
  for (int c = 0; kGrads && c < kCols; ++c) {
    grads.weight[c] += static_cast<A>(fold(weight_sums[c]));
    if (Norm::kHasBias) {
      grads.bias[c] += static_cast<A>(fold(bias_sums[c]));
    }
  }
}

// Recovers x̂ of a row that holds the output.
template <typename A>
void recover_xhat(const A* __restrict weight, const A* __restrict bias, std::int64_t cols,
                  A* __restrict x) {
  for (std::int64_t col = 0; col < cols; ++col) {
    const A smallest = std::copysign(static_cast<A>(kSmallestWeight), weight[col]);
    const bool is_small = std::abs(weight[col]) < static_cast<A>(kSmallestWeight);
    x[col] = (x[col] - bias[col]) / (is_small ? smallest : weight[col]);
  }
}

}  // namespace fused_op::cpu::FUSED_OP_CPU_LEVEL
