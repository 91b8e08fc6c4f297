// The sums of a row, in an order that depends only on its length: kLanes accumulators, whose total
// is added to a double after every kSumCols columns. Included only by a level: level.h.
#pragma once

#include "cpu/level.h"
#include "cpu/tiles.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

// A float sum of 2^28 squares would stop growing.
constexpr std::int64_t kSumCols = kTileCols;

template <int kLanes, typename A>
FUSED_OP_CPU_INLINE A add_lanes(const A (&lanes)[kLanes]) {
  if constexpr (kLanes == 1) {
    return lanes[0];
  } else {
    A halves[kLanes / 2];
#pragma omp simd
    for (int j = 0; j < kLanes / 2; ++j) {
      halves[j] = lanes[j] + lanes[j + kLanes / 2];
    }
    return add_lanes(halves);
  }
}

// Rows of few columns have four lanes. Most of their rounding error would come from here: with
// float, the error of y at 6 columns is half as large again.
template <int kLanes, typename A>
FUSED_OP_CPU_INLINE double fold(const A (&lanes)[kLanes]) {
  if constexpr (kLanes == 4) {
    return (static_cast<double>(lanes[0]) + static_cast<double>(lanes[2])) +
           (static_cast<double>(lanes[1]) + static_cast<double>(lanes[3]));
  } else {
    return static_cast<double>(add_lanes(lanes));
  }
}

// In loops over packs. One lane takes only rows that are rare, and narrow ones. Compilers would
// vectorise these loops all the same, with checks of what overlaps, to up to five times the code.
template <int kLanes>
FUSED_OP_CPU_INLINE void stay_scalar() {
  if constexpr (kLanes == 1) {
    asm volatile("");
  }
}

// A row is processed in packs of kLanes columns. If they do not divide the row, the last pack ends
// at the end of the row and skips the columns of the pack before it: a mask makes them zeros. Every
// loop then has kLanes steps. (Compilers turn a condition on the lane into scalar code.)
template <typename A>
using Bits = std::conditional_t<sizeof(A) == 4, std::int32_t, std::int64_t>;
template <typename A>
constexpr auto kLaneMasks = [] {
  std::array<Bits<A>, 2 * kMaxLanes> masks{};
  std::fill(masks.begin() + kMaxLanes, masks.end(), Bits<A>(-1));
  return masks;
}();

// The masks of a pack of which only the last columns, [first, last), are new.
template <int kLanes, typename A>
FUSED_OP_CPU_INLINE const Bits<A>* masks_of(std::int64_t first, std::int64_t last) {
  return &kLaneMasks<A>[static_cast<std::size_t>(kMaxLanes - kLanes + (last - first))];
}
template <typename A>
FUSED_OP_CPU_INLINE A masked(A value, Bits<A> mask) {
  return std::bit_cast<A>(std::bit_cast<Bits<A>>(value) & mask);
}

// Begins sums of `scale · x - center` and its square. (GCC would clear many lanes by `rep stos`.)
template <int kLanes, typename X, typename A>
FUSED_OP_CPU_INLINE void begin_pack(const X* x, A scale, A center, A (&sums)[kLanes],
                                    A (&squares)[kLanes]) {
  const Pack<kLanes, X, A> values(x);
#pragma omp simd
  for (int j = 0; j < kLanes; ++j) {
    const A deviation = values[j] * scale - center;
    sums[j] = deviation;
    squares[j] = deviation * deviation;
  }
}

// Adds `scale · x - center`, if kSum, and its square.
template <int kLanes, bool kSum, bool kSkips, typename X, typename A>
FUSED_OP_CPU_INLINE void add_pack(const X* x, A scale, A center, const Bits<A>* masks,
                                  A (&sums)[kLanes], A (&squares)[kLanes]) {
  const Pack<kLanes, X, A> values(x);
#pragma omp simd
  for (int j = 0; j < kLanes; ++j) {
    const A found = values[j] * scale - center;
    const A deviation = kSkips ? masked(found, masks[j]) : found;
    if (kSum) {
      sums[j] += deviation;
    }
    squares[j] += deviation * deviation;
  }
}

// Calls function<kLanes, Norm, A>(), with no more lanes than there are columns.
template <typename Norm, typename A, typename Function>
void with_lanes(std::int64_t cols, Function& function) {
  constexpr int kMost = 128 / sizeof(A);
  if (cols >= kMaxLanes) {
    function.template operator()<kMost, Norm, A>();
  } else if (cols >= 16) {
    function.template operator()<8, Norm, A>();
  } else if (cols > kNarrowCols) {
    function.template operator()<4, Norm, A>();
  } else {
    function.template operator()<1, Norm, A>();
  }
}

// Calls function<kCols>() for rows of 1 to 3 columns. Many of them are computed at a time, each in
// a lane of its own.
template <typename Function>
FUSED_OP_CPU_INLINE void with_narrow(std::int64_t cols, const Function& function) {
  if (cols == 3) {
    function.template operator()<3>();
  } else if (cols == 2) {
    function.template operator()<2>();
  } else {
    function.template operator()<1>();
  }
}

// Calls function<X>() with the type in which rows are read. For all but short rows it may have 16
// bits; elements are then converted as they are loaded.
template <int kLanes, typename A, typename Function>
void with_elements(DType rows, Function& function) {
  if constexpr (kLanes == kMaxLanes && FUSED_OP_CPU_READS_16_BITS) {
    if (rows == DType::kFloat16) {
      return function.template operator()<Float16>();
    }
    if (rows == DType::kBFloat16) {
      return function.template operator()<BFloat16>();
    }
  }
  function.template operator()<A>();
}

// A bias of an RMS norm does not make a type: only the last step of forward and a pass of backward
// know of it.
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

// Prefetches what will be read or written next during the current computation. If rows come from
// memory, each would otherwise wait for the other. Any address is allowed.
template <int kLanes, bool kWrites = false, typename E>
FUSED_OP_CPU_INLINE void prefetch_pack(const E* next) {
  constexpr int kLine = 64 / sizeof(E);
  for (int j = 0; j < kLanes; j += kLine) {
    __builtin_prefetch(next + j, kWrites, 2);
  }
}

struct Totals {
  double sum = 0;
  double squares = 0;
};

template <int kLanes, bool kSum, typename X, typename A>
FUSED_OP_CPU_INLINE void add_deviations(const X* x, std::int64_t cols, A scale, A center,
                                        Totals& totals) {
  for (std::int64_t col = 0, count = 0; col < cols; col += count) {
    count = piece(col, cols, kSumCols);
    A sums[kLanes];
    A squares[kLanes];
    const std::int64_t last = col + count;
    std::int64_t i = col;
    if constexpr (kSum) {
      begin_pack<kLanes>(x + i, scale, center, sums, squares);
      i += kLanes;
    } else {
      std::fill_n(squares, kLanes, A(0));
    }
    for (; i + kLanes <= last; i += kLanes) {
      stay_scalar<kLanes>();
      add_pack<kLanes, kSum, false>(x + i, scale, center, nullptr, sums, squares);
    }
    if (i < last) {
      add_pack<kLanes, kSum, true>(x + last - kLanes, scale, center, masks_of<kLanes, A>(i, last),
                                   sums, squares);
    }
    if (kSum) {
      totals.sum += fold(sums);
    }
    totals.squares += fold(squares);
  }
}

template <typename A>
FUSED_OP_CPU_INLINE bool needs_care(A second) {
  return !(second <= Limits<A>::kLargest);
}

// Moments of `count` values from the totals of their deviations from `center`: the mean, exact to
// the rounding of the deviations, and Σ(x - mean)². The latter loses no digits to cancellation if
// the center is within a deviation of the mean. If it is not, it is NaN, which marks values that
// need care. `is_mean` says that the center is the rounded mean: then no more is lost than the
// squares of tiny deviations, which are zeros.
template <typename A>
FUSED_OP_CPU_INLINE Moments<A> moments_of(A center, const Totals& totals, double count,
                                          bool is_mean = false) {
  const double offset = totals.sum / count;
  const double mean = static_cast<double>(center) + offset;
  const A rounded = static_cast<A>(mean);
  const double lost = offset * totals.sum;
  const double second = totals.squares - lost;
  const double unknown = is_mean ? 0 : std::numeric_limits<double>::quiet_NaN();
  return {rounded, static_cast<A>(mean - static_cast<double>(rounded)),
          static_cast<A>(second < (is_mean ? 0 : lost) ? unknown : second)};
}

}  // namespace fused_op::cpu::FUSED_OP_CPU_LEVEL
