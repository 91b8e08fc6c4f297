// What backward computes for one row, for two, or for many short ones: the sums, the parameter
// gradients, dx. Included only by a level: level.h.
#pragma once

#include "cpu/level.h"
#include "cpu/sums.h"
#include "cpu/tiles.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

// One row, or a part of it, as backward reads it, with what makes x̂ of the values in x.
template <typename X, typename A>
struct RowIn {
  const X* x;
  const X* dy;
  A mean;
  A rstd;

  // Its constants cost nothing, because the compiler knows them.
  FUSED_OP_CPU_INLINE Normalizer<A> normalizer() const { return {A(1), mean, A(-0.0), rstd}; }
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
template <bool kSkips, int kRows, int kLanes, typename Norm, typename Met, typename X, typename A>
FUSED_OP_CPU_INLINE void pullback_pack(const RowIn<X, A> (&rows)[kRows], const A* weight,
                                       std::int64_t col, const Bits<A>* masks,
                                       A (&wdy_xhat)[kRows][kLanes], A (&wdy)[kRows][kLanes],
                                       const ParameterGrads<A> grads) {
  constexpr bool kGrads = !std::is_same_v<Met, Unwanted>;
  A* const __restrict dweight = grads.weight;
  A* const __restrict dbias = grads.bias;
  const auto packs = [&]<std::size_t... r>(std::index_sequence<r...>) {
    return std::array{RowPack<kLanes, X, A>(rows[r], col)...};
  }(std::make_index_sequence<kRows>());
  const Pack<kLanes, A, A> weights(weight + col);
  Normalizer<A> normalizers[kRows];  // in registers, which the stores below do not change
  for (int r = 0; r < kRows; ++r) {
    normalizers[r] = rows[r].normalizer();
  }
#pragma omp simd
  for (int j = 0; j < kLanes; ++j) {
    A weight_sum = kGrads ? dweight[j] : A(0);
    A bias_sum = kGrads && Norm::kHasBias ? dbias[j] : A(0);
    for (int r = 0; r < kRows; ++r) {
      const auto kept = [&](A value) { return kSkips ? masked(value, masks[j]) : value; };
      const A xhat = kept(Norm::normalized(packs[r].x[j], normalizers[r]));
      const A grad_xhat = kept(weights[j] * packs[r].dy[j]);
      const A grad = kept(packs[r].dy[j]);
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
template <int kRows, int kLanes, typename Norm, typename Met, typename X, typename A>
FUSED_OP_CPU_INLINE void add_pullback(const RowIn<X, A> (&rows)[kRows], const A* weight,
                                      std::int64_t cols, PullbackTotals* totals,
                                      const ParameterGrads<A> grads, const ParameterGrads<A> tail) {
  constexpr bool kGrads = !std::is_same_v<Met, Unwanted>;
  for (std::int64_t first = 0, count = 0; first < cols; first += count) {
    count = piece(first, cols, kSumCols);
    A wdy_xhat[kRows][kLanes] = {};
    A wdy[kRows][kLanes] = {};
    const std::int64_t last = first + count;
    std::int64_t col = first;
    for (; col + kLanes <= last; col += kLanes) {
      stay_scalar<kLanes>();
      pullback_pack<false, kRows, kLanes, Norm, Met>(rows, weight, col, nullptr, wdy_xhat, wdy,
                                                     kGrads ? grads.from(col) : grads);
    }
    if (col < last) {
      pullback_pack<true, kRows, kLanes, Norm, Met>(
          rows, weight, last - kLanes, masks_of<kLanes, A>(col, last), wdy_xhat, wdy, tail);
    }
    for (int r = 0; r < kRows; ++r) {
      totals[r].wdy_xhat += fold(wdy_xhat[r]);
      totals[r].wdy += fold(wdy[r]);
    }
  }
}

template <int kLanes, typename Norm, bool kAdds, typename X, typename A>
FUSED_OP_CPU_INLINE void dx_pack(const RowIn<X, A>& row, const A* weight, const X* dsum,
                                 std::int64_t col, const Pullback<Norm, A> pullback,
                                 X* __restrict dx) {
  const Pack<kLanes, X, A> x(row.x + col), dy(row.dy + col);
  const Pack<kLanes, A, A> weights(weight + col);
  const Pack<kAdds ? kLanes : 0, X, A> addends(kAdds ? dsum + col : nullptr);
  const Normalizer<A> normalizer = row.normalizer();
  const auto result = [&](int j) {
    const A grad = pullback(weights[j] * dy[j], Norm::normalized(x[j], normalizer));
    return kAdds ? grad + addends[j] : grad;
  };
  store_results<kLanes, A>(result, dx + col);
}

// `next` is where the row lies that is read next, and `next_dx` where its dx does. Neither need
// exist. Doubles wait for both: forward and backward of 16384 x 64 took 1.62 ms without `next_dx`,
// and 1.38 with it (EPYC, one thread).
template <int kLanes, typename Norm, bool kAdds, typename X, typename A>
FUSED_OP_CPU_INLINE void write_dx(const RowIn<X, A>& row, const A* weight, const X* dsum,
                                  const Pullback<Norm, A>& pullback, std::int64_t cols, X* dx,
                                  const RowIn<X, A>& next, const X* next_dx) {
  std::int64_t col = 0;
  for (; col + kLanes <= cols; col += kLanes) {
    stay_scalar<kLanes>();
    prefetch_pack<kLanes>(next.x + col);
    prefetch_pack<kLanes>(next.dy + col);
    if constexpr (sizeof(X) == 8) {
      prefetch_pack<kLanes, true>(next_dx + col);
    }
    dx_pack<kLanes, Norm, kAdds>(row, weight, dsum, col, pullback, dx);
  }
  if (col < cols) {
    dx_pack<kLanes, Norm, kAdds>(row, weight, dsum, cols - kLanes, pullback, dx);
  }
}

// Rows of kCols columns, each row in a lane of its own.
template <int kCols, typename Norm, typename Met, typename A>
void backward_narrow(const A* __restrict x, const A* __restrict dy, const A* __restrict weight,
                     const A* __restrict mean, const A* __restrict rstd, std::int64_t rows,
                     A inverse_divisor, A* __restrict dx, const ParameterGrads<A> grads) {
  constexpr int kLanes = 16;
  constexpr bool kGrads = !std::is_same_v<Met, Unwanted>;
  A weight_sums[kCols][kLanes] = {};
  A bias_sums[kCols][kLanes] = {};
  for (std::int64_t row = 0; row < rows; row += kLanes) {
    const auto lanes = static_cast<int>(std::min<std::int64_t>(kLanes, rows - row));
#pragma omp simd
    for (int j = 0; j < lanes; ++j) {
      const std::int64_t at = (row + j) * kCols;
      const Normalizer<A> normalizer{A(1), mean[row + j], A(-0.0), rstd[row + j]};
      PullbackSums<A> sums{A(0), A(0)};
      for (int c = 0; c < kCols; ++c) {
        const A xhat = Norm::normalized(x[at + c], normalizer);
        sums.add(weight[c] * dy[at + c], xhat);
        weight_sums[c][j] += kGrads ? dy[at + c] * Met()(xhat) : A(0);
        bias_sums[c][j] += kGrads && Norm::kHasBias ? dy[at + c] : A(0);
      }
      const Pullback<Norm, A> pullback(sums, normalizer, inverse_divisor);
      for (int c = 0; c < kCols; ++c) {
        dx[at + c] = pullback(weight[c] * dy[at + c], Norm::normalized(x[at + c], normalizer));
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

// The bias's gradients of an RMS norm: those that the functions above sum for LayerNorm, in the
// same order.
template <int kLanes, typename X, typename A>
FUSED_OP_CPU_INLINE void add_row_pair(const X* first, const X* second, A* __restrict to) {
  const Pack<kLanes, X, A> a(first), b(second);
#pragma omp simd
  for (int j = 0; j < kLanes; ++j) {
    to[j] = (to[j] + a[j]) + b[j];
  }
}
template <int kLanes, typename X, typename A>
FUSED_OP_CPU_INLINE void add_row(const X* row, A* __restrict to) {
  const Pack<kLanes, X, A> a(row);
#pragma omp simd
  for (int j = 0; j < kLanes; ++j) {
    to[j] += a[j];
  }
}
template <int kLanes, typename X, typename A>
__attribute__((noinline)) void add_grads_of_bias(const View<X>& dy, std::int64_t rows,
                                                 std::int64_t cols, A* dbias) {
  const std::int64_t whole = cols - cols % kLanes;
  for (std::int64_t r = 0; r < rows; ++r) {
    const X* const row = dy.row(r);
    if (r + 1 < rows) {  // two rows at once halve the traffic of the sums
      const X* const next = dy.row(++r);
      for (std::int64_t col = 0; col < whole; col += kLanes) {
        add_row_pair<kLanes>(row + col, next + col, dbias + col);
      }
      for (std::int64_t col = whole; col < cols; ++col) {
        add_row_pair<1>(row + col, next + col, dbias + col);
      }
    } else {
      for (std::int64_t col = 0; col < whole; col += kLanes) {
        add_row<kLanes>(row + col, dbias + col);
      }
      for (std::int64_t col = whole; col < cols; ++col) {
        add_row<1>(row + col, dbias + col);
      }
    }
  }
}
// Of narrow rows, in sixteen lanes of rows.
template <int kCols, typename A>
__attribute__((noinline)) void add_narrow_grads_of_bias(const A* dy, std::int64_t rows, A* dbias) {
  constexpr int kLanes = 16;
  A sums[kCols][kLanes] = {};
  for (std::int64_t row = 0; row < rows; ++row) {
    for (int c = 0; c < kCols; ++c) {
      sums[c][row % kLanes] += dy[row * kCols + c];
    }
  }
  for (int c = 0; c < kCols; ++c) {
    dbias[c] += static_cast<A>(fold(sums[c]));
  }
}

template <int kLanes, typename A>
FUSED_OP_CPU_SHARED void add_tail(const A* __restrict tail, A* __restrict last) {
#pragma omp simd
  for (int j = 0; j < kLanes; ++j) {  // skipped columns are 0
    last[j] += tail[j];
  }
}

template <typename A>
FUSED_OP_CPU_SHARED bool has_tiny(const A* rstd, std::int64_t count) {
  bool found = false;
  for (std::int64_t i = 0; i < count; ++i) {
    found = found || rstd[i] < Limits<A>::kTinyRstd;
  }
  return found;
}

// x̂ of a row, in its place.
template <typename Norm, typename A>
FUSED_OP_CPU_SHARED void normalize_row(const Normalizer<A> normalizer, std::int64_t cols, A* x) {
#pragma omp simd
  for (std::int64_t col = 0; col < cols; ++col) {
    x[col] = Norm::normalized(x[col], normalizer);
  }
}

// Recovers x̂ of a row that holds the output.
template <typename A>
FUSED_OP_CPU_SHARED void recover_xhat(const A* __restrict weight, const A* __restrict bias,
                                      std::int64_t cols, A* __restrict x) {
  for (std::int64_t col = 0; col < cols; ++col) {
    const A smallest = std::copysign(static_cast<A>(kSmallestWeight), weight[col]);
    const bool is_small = std::abs(weight[col]) < static_cast<A>(kSmallestWeight);
    x[col] = (x[col] - bias[col]) / (is_small ? smallest : weight[col]);
  }
}

}  // namespace fused_op::cpu::FUSED_OP_CPU_LEVEL
