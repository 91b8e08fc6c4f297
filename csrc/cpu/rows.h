// One row, forward and backward, of any types that C++ knows: core's formulas and row sources. A
// row is taken in packs of kLanes elements, each lane with its own accumulator: the order of every
// sum is a function of the row length alone, and compilers vectorise it without reordering.
// Torch-free.
#pragma once

#include <algorithm>

#include "cpu/dispatch.h"

namespace fused_op::cpu {

constexpr int kLanes = 16;
// Lane sums are added to a double after so many columns: a float sum of 2^28 squares would stall.
constexpr std::int64_t kBlockCols = 64 * kLanes;

// Calls function(col, valid) for every pack of a row.
template <typename Function>
inline void for_each_pack(std::int64_t first_col, std::int64_t last_col, Function&& function) {
  std::int64_t col = first_col;
  for (; col + kLanes <= last_col; col += kLanes) {
    function(col, kLanes);
  }
  if (col < last_col) {
    function(col, static_cast<int>(last_col - col));
  }
}

// Sum over a row of what accumulate(col, valid, lanes) adds to its lanes.
template <int kSums, typename A, typename Accumulate>
inline void sum_row(std::int64_t cols, double (&totals)[kSums], Accumulate&& accumulate) {
  std::fill(totals, totals + kSums, 0.0);
  for (std::int64_t first = 0; first < cols; first += kBlockCols) {
    A lanes[kSums][kLanes] = {};
    for_each_pack(first, std::min(cols, first + kBlockCols),
                  [&](std::int64_t col, int valid) { accumulate(col, valid, lanes); });
    for (int s = 0; s < kSums; ++s) {
      for (int j = 0; j < kLanes; ++j) {
        totals[s] += static_cast<double>(lanes[s][j]);
      }
    }
  }
}

// Two passes: Σ(x - mean)² has no cancellation where |mean| >> deviation, unlike Σx² - mean². With
// `refined`, a pass more for the mean.
template <typename Norm, typename T, typename A>
Moments<A> row_moments(const T* row, std::int64_t cols, A scale, bool refined) {
  double totals[2];
  Moments<A> moments{};
  for (int pass = 0; Norm::kCentered && pass < (refined ? 2 : 1); ++pass) {
    sum_row<2, A>(cols, totals, [&](std::int64_t col, int valid, A(&lanes)[2][kLanes]) {
      A x[kLanes];
      unpack(ByteAccess::load<kLanes>(row, col, cols), x);
      for (int j = 0; j < kLanes; ++j) {
        lanes[0][j] += j < valid ? x[j] * scale - moments.mean : A(0);
      }
    });
    moments.mean += static_cast<A>(totals[0] / static_cast<double>(cols));
  }
  sum_row<2, A>(cols, totals, [&](std::int64_t col, int valid, A(&lanes)[2][kLanes]) {
    A x[kLanes];
    unpack(ByteAccess::load<kLanes>(row, col, cols), x);
    for (int j = 0; j < kLanes; ++j) {
      const A deviation = j < valid ? x[j] * scale - moments.mean : A(0);
      lanes[0][j] += deviation;
      lanes[1][j] += deviation * deviation;
    }
  });
  const double rest = Norm::kCentered ? totals[0] / static_cast<double>(cols) : 0.0;
  moments.rest = static_cast<A>(rest);
  moments.second = static_cast<A>(totals[1] - rest * rest * static_cast<double>(cols));
  return moments;
}

template <typename W, typename Norm, typename Source>
void forward_row(const NormForwardArgs& args, std::int64_t row) {
  using T = typename Source::Element;
  using A = Accumulator<T>;
  const Source source(args, row);
  for_each_pack(0, args.cols,
                [&](std::int64_t col, int) { source.template finish<kLanes>(col, args.cols); });
  const T* values = source.row();

  A scale = A(1);
  Moments<A> moments = row_moments<Norm>(values, args.cols, scale, false);
  if (!trusted(moments, static_cast<A>(args.cols))) {
    moments = row_moments<Norm>(values, args.cols, scale, true);
    if (overflowed(moments)) {
      scale = Limits<A>::kScale;
      moments = row_moments<Norm>(values, args.cols, scale, true);
      unscale(moments, scale);
    }
  }
  const Normalizer<A> normalizer =
      Norm::normalizer(moments, scale, A(1) / static_cast<A>(args.cols), static_cast<A>(args.eps));
  if (args.stats != nullptr) {
    Norm::save(normalizer, moments, static_cast<A*>(args.stats), row, args.rows);
  }

  const W* weight = static_cast<const W*>(args.weight);
  const W* bias = static_cast<const W*>(args.bias);
  T* output = static_cast<T*>(args.output.data) + row * args.cols;
  for_each_pack(0, args.cols, [&](std::int64_t col, int) {
    A x[kLanes], w[kLanes], b[kLanes];
    unpack(ByteAccess::load<kLanes>(values, col, args.cols), x);
    unpack(ByteAccess::load_or<kLanes>(weight, col, args.cols, 1), w);
    unpack(ByteAccess::load_or<kLanes>(bias, col, args.cols, 0), b);
    for (int j = 0; j < kLanes; ++j) {
      x[j] = multiply_add(Norm::normalized(x[j], normalizer), w[j], b[j]);
    }
    ByteAccess::store(output, col, args.cols, pack_from<T, kLanes>(x));
  });
}

template <typename W, typename Norm, typename Source>
void backward_row(const NormBackwardArgs& args, std::int64_t row,
                  Accumulator<typename Source::Element>* partials) {
  using T = typename Source::Element;
  using A = Accumulator<T>;
  const T* x_row = row_of<T>(args.x, row);
  const T* dy_row = row_of<T>(args.grad_output, row);
  const W* weight = static_cast<const W*>(args.weight);
  const Normalizer<A> normalizer =
      Norm::saved(static_cast<const A*>(args.stats), row, args.rows).normalizer();

  // x̂ and wdy of one pack; past the row's end both are 0.
  const auto read = [&](std::int64_t col, int valid, A(&xhat)[kLanes], A(&dy)[kLanes],
                        A(&wdy)[kLanes]) {
    unpack(ByteAccess::load<kLanes>(x_row, col, args.cols), xhat);
    unpack(ByteAccess::load<kLanes>(dy_row, col, args.cols), dy);
    unpack(ByteAccess::load_or<kLanes>(weight, col, args.cols, 1), wdy);
    for (int j = 0; j < kLanes; ++j) {
      xhat[j] = j < valid ? Norm::normalized(xhat[j], normalizer) : A(0);
      wdy[j] *= dy[j];
    }
  };

  double totals[2];
  sum_row<2, A>(args.cols, totals, [&](std::int64_t col, int valid, A(&lanes)[2][kLanes]) {
    A xhat[kLanes], dy[kLanes], wdy[kLanes];
    read(col, valid, xhat, dy, wdy);
    for (int j = 0; j < kLanes; ++j) {
      lanes[0][j] += wdy[j] * xhat[j];
      lanes[1][j] += wdy[j];
    }
    if (partials != nullptr) {
      for (int j = 0; j < valid; ++j) {
        partials[col + j] += dy[j] * xhat[j];
        if (Norm::kGrads == 2) {
          partials[args.cols + col + j] += dy[j];
        }
      }
    }
  });
  if (args.grad_input.data == nullptr) {
    return;
  }
  const PullbackSums<A> sums{static_cast<A>(totals[0]), static_cast<A>(totals[1])};
  const Pullback<Norm, A> pullback(sums, normalizer, A(1) / static_cast<A>(args.cols));
  T* dx_row = static_cast<T*>(args.grad_input.data) + row * args.cols;
  for_each_pack(0, args.cols, [&](std::int64_t col, int valid) {
    A xhat[kLanes], dy[kLanes], wdy[kLanes];
    read(col, valid, xhat, dy, wdy);
    for (int j = 0; j < kLanes; ++j) {
      xhat[j] = pullback(wdy[j], xhat[j]);
    }
    if (Source::kAdds) {
      unpack(ByteAccess::load<kLanes>(row_of<T>(args.grad_sum, row), col, args.cols), dy);
      for (int j = 0; j < kLanes; ++j) {
        xhat[j] += dy[j];
      }
    }
    ByteAccess::store(dx_row, col, args.cols, pack_from<T, kLanes>(xhat));
  });
}

}  // namespace fused_op::cpu
