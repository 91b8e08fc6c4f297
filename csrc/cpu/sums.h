// The sums of a row, in an order that is a function of its length alone: kLanes accumulators, and a
// total in double of every kSumCols columns. Included by a level alone: level.h.
#pragma once

#include "cpu/level.h"
#include "cpu/tiles.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

// A float sum of 2^28 squares would stall.
constexpr std::int64_t kSumCols = 2048;

template <int kLanes, typename A>
inline double fold(A (&lanes)[kLanes]) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) {
      lanes[j] += lanes[j + half];
    }
  }
  return static_cast<double>(lanes[0]);
}

// A row is taken in packs of kLanes columns. Where they do not divide it, the last pack ends at the
// row's end and skips what the pack before it has: every loop is of kLanes steps.
template <int kLanes>
inline int skip_of(std::int64_t first, std::int64_t last) {
  return static_cast<int>(kLanes - (last - first));
}

// Adds `scale · x - mean` where kSum, and its square where kSquares.
template <int kLanes, bool kSum, bool kSquares, typename A>
inline void add_pack(const A* x, A scale, A mean, int skip, A (&sums)[kLanes],
                     A (&squares)[kLanes]) {
  for (int j = 0; j < kLanes; ++j) {
    const A deviation = j >= skip ? x[j] * scale - mean : A(0);
    if (kSum) {
      sums[j] += deviation;
    }
    if (kSquares) {
      squares[j] += deviation * deviation;
    }
  }
}

// Calls function<kLanes, Norm, A>() with no more lanes than there are columns.
template <typename Norm, typename A, typename Function>
void with_lanes(std::int64_t cols, Function& function) {
  constexpr int kMost = 128 / sizeof(A);
  if (cols >= kMost) {
    function.template operator()<kMost, Norm, A>();
  } else if (cols >= 16) {
    function.template operator()<kMost / 2, Norm, A>();
  } else if (cols >= 4) {
    function.template operator()<4, Norm, A>();
  } else {
    function.template operator()<1, Norm, A>();
  }
}

template <typename Function>
void with_types(NormKind kind, DType dtype, std::int64_t cols, Function& function) {
  const bool is_double = dtype == DType::kFloat64;
  if (kind == NormKind::kLayerNorm) {
    is_double ? with_lanes<LayerNorm, double>(cols, function)
              : with_lanes<LayerNorm, float>(cols, function);
  } else {
    is_double ? with_lanes<RmsNorm, double>(cols, function)
              : with_lanes<RmsNorm, float>(cols, function);
  }
}

struct Totals {
  double sum = 0;
  double squares = 0;
};

template <int kLanes, bool kSum, bool kSquares, typename A>
inline void add_deviations(const A* x, std::int64_t cols, A scale, A mean, Totals& totals) {
  for (std::int64_t col = 0, count = 0; col < cols; col += count) {
    count = piece(col, cols, kSumCols);
    A sums[kLanes] = {};
    A squares[kLanes] = {};
    const std::int64_t last = col + count;
    std::int64_t i = col;
    for (; i + kLanes <= last; i += kLanes) {
      add_pack<kLanes, kSum, kSquares>(x + i, scale, mean, 0, sums, squares);
    }
    if (i < last) {
      const int skip = skip_of<kLanes>(i, last);
      add_pack<kLanes, kSum, kSquares>(x + last - kLanes, scale, mean, skip, sums, squares);
    }
    if (kSum) {
      totals.sum += fold(sums);
    }
    if (kSquares) {
      totals.squares += fold(squares);
    }
  }
}

}  // namespace fused_op::cpu::FUSED_OP_CPU_LEVEL
