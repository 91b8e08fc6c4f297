// From the moments of a row to its normaliser, and the rows that need care for that: rare ones,
// which are measured again. Included only by a level: level.h.
#pragma once

#include "cpu/level.h"
#include "cpu/sums.h"
#include "cpu/tiles.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

// In double, one rounding less than the GPU's product. Of fp16 outputs with rounding before the
// weight, a share of 3.5e-5 then differs from PyTorch's operations at 1000 columns, instead
// of 4.6e-5.
template <typename Norm, typename A>
FUSED_OP_CPU_INLINE Normalizer<A> normalizer_of_row(const Moments<A>& found, A scale,
                                                    double inverse_divisor, A eps) {
  const A mean_square = static_cast<A>(static_cast<double>(found.second) * inverse_divisor);
  return Norm::normalizer(Moments<A>{found.mean, found.rest, mean_square}, scale, A(1), eps);
}
inline double inverse_divisor(const NormForwardArgs& args) {
  return 1 / static_cast<double>(divisor(args.kind, args.cols));
}

// Of a row that is converted in parts, for one pass over it.
template <int kLanes, typename Norm, typename A>
__attribute__((noinline)) Totals deviations_of_row(const ConstRows& rows, std::int64_t row,
                                                   std::int64_t cols, A scale, A center) {
  Totals totals;
  for (std::int64_t col = 0, count = 0; col < cols; col += count) {
    count = piece(col, cols, kSumCols);
    const View<A> part = read_tile(rows, {row, 1, col, count}, tile_buffer<A>(3));
    add_deviations<kLanes, Norm::kCentered>(part.first, count, scale, center, totals);
  }
  return totals;
}

// For a row whose center was far from its mean, or whose squares overflowed.
template <int kLanes, typename Norm, typename A>
__attribute__((noinline)) Normalizer<A> careful_normalizer(const NormForwardArgs& args,
                                                           const ConstRows& rows, std::int64_t row,
                                                           A mean) {
  const auto measure = [&](A scale, A center) {
    const Totals totals = deviations_of_row<kLanes, Norm>(rows, row, args.cols, scale, center);
    return moments_of(center, totals, static_cast<double>(args.cols), true);
  };
  A scale = A(1);
  Moments<A> found = measure(scale, mean);
  if (needs_care(found.second)) {
    scale = Limits<A>::kScale;
    found = Moments<A>{};
    for (int i = 0; i < (Norm::kCentered ? 3 : 1); ++i) {
      found = measure(scale, found.mean);
    }
    unscale(found, scale);
  }
  const Normalizer<A> result =
      normalizer_of_row<Norm>(found, scale, inverse_divisor(args), static_cast<A>(args.eps));
  if (args.stats != nullptr) {
    Norm::save(result, found, static_cast<A*>(args.stats), row, args.rows);
  }
  return result;
}

}  // namespace fused_op::cpu::FUSED_OP_CPU_LEVEL
