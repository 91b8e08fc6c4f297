// What backward computes of one row, of two, or of many short ones: the sums, the gradients of the
// parameters, dx. Included by a level alone: level.h.
#pragma once

#include "cpu/level.h"
#include "cpu/sums.h"
#include "cpu/tiles.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

// One row, or a part of it, as backward reads it.
template <typename A>
struct RowIn {
  const A* x;
  const A* dy;
  Normalizer<A> normalizer;  // of what is read
};

struct PullbackTotals {
  double wdy_xhat = 0;
  double wdy = 0;
};

// The gradients of the parameters, summed over the rows of a chunk.
template <typename A>
struct ParameterGrads {
  A* weight = nullptr;
  A* bias = nullptr;

  ParameterGrads from(std::int64_t col) const { return {weight + col, bias + col}; }
};

// Columns `col` and on of a row or two: their sums by lanes, and what they add to the gradients of
// the parameters, row after row. Two at once halve the traffic of those.
template <int kRows, int kLanes, typename Norm, bool kGrads, typename A>
FUSED_OP_CPU_INLINE void pullback_pack(const RowIn<A> (&rows)[kRows], const A* __restrict weight,
                                       std::int64_t col, int skip, A (&wdy_xhat)[kRows][kLanes],
                                       A (&wdy)[kRows][kLanes], const ParameterGrads<A> grads) {
  A* const __restrict dweight = grads.weight;
  A* const __restrict dbias = grads.bias;
#pragma omp simd
  for (int j = 0; j < kLanes; ++j) {
    A weight_sum = kGrads ? dweight[j] : A(0);
    A bias_sum = kGrads && Norm::kCentered ? dbias[j] : A(0);
    for (int r = 0; r < kRows; ++r) {
      const A x = rows[r].x[col + j];
      const A dy = rows[r].dy[col + j];
      const A xhat = j >= skip ? Norm::normalized(x, rows[r].normalizer) : A(0);
      const A grad_xhat = j >= skip ? weight[col + j] * dy : A(0);
      const A grad = j >= skip ? dy : A(0);
      wdy_xhat[r][j] += grad_xhat * xhat;
      weight_sum += grad * xhat;
      if (Norm::kCentered) {
        wdy[r][j] += grad_xhat;
        bias_sum += grad;
      }
    }
    if (kGrads) {
      dweight[j] = weight_sum;
      if (Norm::kCentered) {
        dbias[j] = bias_sum;
      }
    }
  }
}

// `tail` is for the last pack: stores to columns that the pack before it has just written would
// stall the loads of the next row.
template <int kRows, int kLanes, typename Norm, bool kGrads, typename A>
FUSED_OP_CPU_INLINE void add_pullback(const RowIn<A> (&rows)[kRows], const A* weight,
                                      std::int64_t cols, PullbackTotals* totals,
                                      const ParameterGrads<A> grads, const ParameterGrads<A> tail) {
  for (std::int64_t first = 0, count = 0; first < cols; first += count) {
    count = piece(first, cols, kSumCols);
    A wdy_xhat[kRows][kLanes] = {};
    A wdy[kRows][kLanes] = {};
    const std::int64_t last = first + count;
    std::int64_t col = first;
    for (; col + kLanes <= last; col += kLanes) {
      pullback_pack<kRows, kLanes, Norm, kGrads>(rows, weight, col, 0, wdy_xhat, wdy,
                                                 kGrads ? grads.from(col) : grads);
    }
    if (col < last) {
      pullback_pack<kRows, kLanes, Norm, kGrads>(rows, weight, last - kLanes,
                                                 skip_of<kLanes>(col, last), wdy_xhat, wdy, tail);
    }
    for (int r = 0; r < kRows; ++r) {
      totals[r].wdy_xhat += fold(wdy_xhat[r]);
      totals[r].wdy += fold(wdy[r]);
    }
  }
}

template <int kLanes, typename Norm, bool kAdds, typename A>
FUSED_OP_CPU_INLINE void dx_pack(const A* __restrict x, const A* __restrict dy,
                                 const A* __restrict weight, const A* __restrict dsum,
                                 const Normalizer<A> normalizer, const Pullback<Norm, A> pullback,
                                 A* __restrict dx) {
#pragma omp simd
  for (int j = 0; j < kLanes; ++j) {
    const A grad = pullback(weight[j] * dy[j], Norm::normalized(x[j], normalizer));
    dx[j] = kAdds ? grad + dsum[j] : grad;
  }
}

template <int kLanes, typename Norm, bool kAdds, typename A>
FUSED_OP_CPU_INLINE void write_dx_packs(const A* x, const A* dy, const A* weight, const A* dsum,
                                        const Normalizer<A> normalizer,
                                        const Pullback<Norm, A>& pullback, std::int64_t cols, A* dx,
                                        const RowIn<A>& next) {
  for (std::int64_t col = 0; col < cols; col += kLanes) {
    const std::int64_t at = std::min(col, cols - kLanes);
    prefetch_pack<kLanes>(next.x + at);
    prefetch_pack<kLanes>(next.dy + at);
    dx_pack<kLanes, Norm, kAdds>(x + at, dy + at, weight + at, kAdds ? dsum + at : nullptr,
                                 normalizer, pullback, dx + at);
  }
}

template <int kLanes, typename Norm, bool kAdds, typename A>
FUSED_OP_CPU_INLINE void write_dx(const A* x, const A* dy, const A* weight, const A* dsum,
                                  const Normalizer<A>& normalizer,
                                  const Pullback<Norm, A>& pullback, std::int64_t cols, A* dx,
                                  const RowIn<A>& next) {
  if (is_plain(normalizer)) {
    write_dx_packs<kLanes, Norm, kAdds>(x, dy, weight, dsum,
                                        plain_normalizer(normalizer.mean, normalizer.rstd),
                                        pullback, cols, dx, next);
  } else {
    write_dx_packs<kLanes, Norm, kAdds>(x, dy, weight, dsum, normalizer, pullback, cols, dx, next);
  }
}

// Rows of kCols columns, each in a lane of its own. All of them are plain.
template <int kCols, typename Norm, bool kGrads, bool kAdds, typename A>
void backward_narrow(const A* __restrict x, const A* __restrict dy, const A* __restrict weight,
                     const A* __restrict dsum, const A* __restrict mean, const A* __restrict rstd,
                     std::int64_t rows, A* __restrict dx, const ParameterGrads<A> grads) {
  constexpr int kLanes = 16;
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
        weight_sums[c][j] += kGrads ? dy[at + c] * xhat : A(0);
        bias_sums[c][j] += kGrads && Norm::kCentered ? dy[at + c] : A(0);
      }
      const Pullback<Norm, A> pullback(sums, normalizer, A(1) / A(kCols));
      for (int c = 0; c < kCols; ++c) {
        const A grad = pullback(weight[c] * dy[at + c], Norm::normalized(x[at + c], normalizer));
        dx[at + c] = kAdds ? grad + dsum[at + c] : grad;
      }
    }
  }
  for (int c = 0; kGrads && c < kCols; ++c) {
    grads.weight[c] += static_cast<A>(fold(weight_sums[c]));
    if (Norm::kCentered) {
      grads.bias[c] += static_cast<A>(fold(bias_sums[c]));
    }
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

}  // namespace fused_op::cpu::FUSED_OP_CPU_LEVEL
