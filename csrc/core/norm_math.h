// Every formula of the library, once for both backends.
//
//   LayerNorm  x̂ = (x - mean) · rstd,  rstd = 1 / √(Σ(x - mean)²/cols + eps),  y = x̂·weight + bias
//
//   RMSNorm    x̂ = x · rstd,           rstd = 1 / √(Σx²/cols + eps),           y = x̂·weight
//
//   L2Norm     x̂ = x · rstd,           rstd = 1 / √(Σx² + eps),                y = x̂
//
//   BiasedRmsNorm is RMSNorm with a bias: what a shift is to its rows.
//
// Backward, with wdy = dy·weight:
//   dx = rstd · (wdy - Σwdy/cols - x̂·Σ(wdy·x̂)/cols),  RMSNorm without the middle term,
//   and L2Norm without the division by cols
//
//   dweight = Σ over rows of dy·x̂,  dbias = Σ over rows of dy
//
// Sources: Ba, Kiros & Hinton 2016 (arXiv:1607.06450); Zhang & Sennrich 2019 (arXiv:1910.07467);
// merging of moments: Chan, Golub & LeVeque 1983.  Torch-free.
#pragma once

#include <cmath>

#include "core/pack.h"

namespace fused_op {

// Rows whose squares overflow (|x| above 1e19 in float) are multiplied by a power of two first. If
// rstd is smaller than kTinyRstd, backward reads the row with the same scale, so that x - mean
// cannot overflow there.
template <typename A>
struct Limits;
template <>
struct Limits<float> {
  static constexpr float kScale = 0x1p-100f;
  static constexpr float kInverseScale = 0x1p100f;
  static constexpr float kTinyRstd = 0x1p-60f;
  static constexpr float kSmallest = 0x1p-126f;
  static constexpr float kLargest = 0x1.fffffep127f;
  static constexpr float kMeanRounding = 0x1p-44f;  // of the mean, squared, with a margin
};
template <>
struct Limits<double> {
  static constexpr double kScale = 0x1p-800;
  static constexpr double kInverseScale = 0x1p800;
  static constexpr double kTinyRstd = 0x1p-500;
  static constexpr double kSmallest = 0x1p-1022;
  static constexpr double kLargest = 0x1.fffffffffffffp1023;
  static constexpr double kMeanRounding = 0x1p-102;
};

// When x̂ is recovered from the output, weights closer to zero than this are replaced by it.
// Otherwise x̂ would be infinite.
constexpr float kSmallestWeight = 1e-5f;

// a·b + c, rounded once on the GPU. (On the CPU, std::fma calls the C library unless the build
// assumes the instruction, which baseline x86-64 does not have; loops with such a call stay
// scalar.)
template <typename A>
FUSED_OP_HD A multiply_add(A a, A b, A c) {
#ifdef __CUDA_ARCH__
  return fma(a, b, c);
#else
  return a * b + c;
#endif
}

// 1 / value for a normal value, exact or off by one unit in the last place. On the GPU it takes
// three instructions; the compiler's division of floats takes twenty and a call.
template <typename A>
FUSED_OP_HD A reciprocal(A value) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(A) == 4) {
    float estimate;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(value));
    return fmaf(fmaf(-value, estimate, 1.0f), estimate, estimate);
  }
#endif
  return A(1) / value;
}

// The moments of `count` values. mean + rest is their mean in about twice the precision of A,
// `second` the sum of squared deviations from it. (RMSNorm: mean = rest = 0, and the sum of
// squares.) The rest matters if |mean| >> deviation: at a ratio of 1e4, the rounding of the mean
// alone would be 5e-4 deviations.
template <typename A>
struct Moments {
  A mean;
  A rest;
  A second;
};

template <typename A>
FUSED_OP_HD A reciprocal_sqrt(A value) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(A) == 4) {
    // The instruction is off by up to two units in the last place; one Newton step makes that one.
    const float estimate = rsqrtf(value);
    return fmaf(0.5f * estimate, fmaf(-value * estimate, estimate, 1.0f), estimate);
  } else {
    return rsqrt(value);
  }
#else
  return A(1) / std::sqrt(value);
#endif
}

// What is known of the scale of a row at compile time.
enum class RowScale { kOne, kAny };

// Turns an element of one row into x̂.
template <typename A>
struct Normalizer {
  A scale;  // 1, or a power of two if the squares overflowed
  A mean;   // of scale·x
  A shift;  // -rest · rstd
  A rstd;   // of scale·x

  FUSED_OP_HD A true_rstd() const { return rstd * scale; }
};

// A row's statistics, as backward reads them.
template <typename A>
struct SavedStats {
  A mean;
  A rstd;

  FUSED_OP_HD Normalizer<A> normalizer() const {
    if (rstd < Limits<A>::kTinyRstd) {
      return {Limits<A>::kScale, mean * Limits<A>::kScale, A(0), rstd * Limits<A>::kInverseScale};
    }
    return {A(1), mean, A(0), rstd};
  }
};

// False if the squares overflowed, or if the deviations are no larger than the rounding of the
// mean, as in a constant row. The row is then computed again with a refined mean, and once more
// times Limits::kScale if its squares still overflow.
template <typename A>
FUSED_OP_HD bool trusted(const Moments<A>& moments, A cols) {
  const A rounding = cols * moments.mean * moments.mean * Limits<A>::kMeanRounding;
  const bool own_mean = cols == A(1);  // the value is its own mean, exactly
  // Not && and ||, which would be branches.
  return (moments.second <= Limits<A>::kLargest) & (own_mean | (moments.second >= rounding));
}
template <typename A>
FUSED_OP_HD bool overflowed(const Moments<A>& moments) {
  return !(moments.second <= Limits<A>::kLargest);
}

// Takes the scale off the moments of a row with a single huge value, where only the sum overflowed.
// With the scale, eps and rstd would vanish.
template <typename A>
FUSED_OP_HD void unscale(Moments<A>& moments, A& scale) {
  if (scale != A(1) && moments.second == A(0)) {
    moments.mean *= Limits<A>::kInverseScale;
    moments.rest *= Limits<A>::kInverseScale;
    scale = A(1);
  }
}

template <typename A>
FUSED_OP_HD A scaled_eps(A eps, A scale) {
  const A scaled = eps * scale * scale;
  return scale == A(1) || scaled > Limits<A>::kSmallest ? scaled : Limits<A>::kSmallest;
}

struct LayerNorm {
  static constexpr bool kCentered = true;  // has a mean
  static constexpr bool kHasBias = true;
  static constexpr bool kOfMean = true;  // divides the sum of squares by the count
  static constexpr int kStats = 2;       // rows of the statistics: mean, rstd
  static constexpr int kGrads = 2;       // parameter gradients: weight, bias

  template <typename A>
  FUSED_OP_HD static Normalizer<A> normalizer(const Moments<A>& moments, A scale, A inverse_cols,
                                              A eps) {
    const A rstd = reciprocal_sqrt(moments.second * inverse_cols + scaled_eps(eps, scale));
    return {scale, moments.mean, -moments.rest * rstd, rstd};
  }
  // If the scale is 1, x - mean is what the moments were computed from, and the compiler takes it
  // from there. H200, bf16, share of copy with kOne and kAny: 0.98 0.94 at 335544x200.
  template <RowScale kScale = RowScale::kAny, typename A>
  FUSED_OP_HD static A normalized(A x, const Normalizer<A>& n) {
    const A deviation = kScale == RowScale::kOne ? x - n.mean : multiply_add(x, n.scale, -n.mean);
    return multiply_add(deviation, n.rstd, n.shift);
  }

  template <typename A>
  FUSED_OP_HD static void save(const Normalizer<A>& n, const Moments<A>& moments, A* stats,
                               std::int64_t row, std::int64_t rows) {
    stats[row] =
        (moments.mean + moments.rest) * (n.scale == A(1) ? A(1) : Limits<A>::kInverseScale);
    stats[rows + row] = n.true_rstd();
  }
  template <typename A>
  FUSED_OP_HD static SavedStats<A> saved(const A* stats, std::int64_t row, std::int64_t rows) {
    return {stats[row], stats[rows + row]};
  }
};

struct RmsNorm {
  static constexpr bool kCentered = false;
  static constexpr bool kHasBias = false;
  static constexpr bool kOfMean = true;
  static constexpr int kStats = 1;
  static constexpr int kGrads = 1;

  template <typename A>
  FUSED_OP_HD static Normalizer<A> normalizer(const Moments<A>& moments, A scale, A inverse_cols,
                                              A eps) {
    return {scale, A(0), A(0),
            reciprocal_sqrt(moments.second * inverse_cols + scaled_eps(eps, scale))};
  }
  template <RowScale kScale = RowScale::kAny, typename A>
  FUSED_OP_HD static A normalized(A x, const Normalizer<A>& n) {
    return (kScale == RowScale::kOne ? x : x * n.scale) * n.rstd;
  }
  template <typename A>
  FUSED_OP_HD static void save(const Normalizer<A>& n, const Moments<A>&, A* stats,
                               std::int64_t row, std::int64_t) {
    stats[row] = n.true_rstd();
  }
  template <typename A>
  FUSED_OP_HD static SavedStats<A> saved(const A* stats, std::int64_t row, std::int64_t) {
    return {A(0), stats[row]};
  }
};

struct BiasedRmsNorm : RmsNorm {
  static constexpr bool kHasBias = true;
  static constexpr int kGrads = 2;
};

struct L2Norm : RmsNorm {
  static constexpr bool kOfMean = false;

  template <typename A>
  FUSED_OP_HD static Normalizer<A> normalizer(const Moments<A>& moments, A scale, A, A eps) {
    return RmsNorm::normalizer(moments, scale, A(1), eps);
  }
};

// No norm: the rows are only multiplied by a factor, and the gradients are those of the product.
struct Identity {
  static constexpr bool kCentered = false;
  static constexpr bool kHasBias = false;
  static constexpr int kStats = 0;
  static constexpr int kGrads = 1;

  template <RowScale kScale = RowScale::kAny, typename A>
  FUSED_OP_HD static A normalized(A x, const Normalizer<A>&) {
    return x;
  }
  template <typename A>
  FUSED_OP_HD static SavedStats<A> saved(const A*, std::int64_t, std::int64_t) {
    return {A(0), A(1)};
  }
};

// The two sums that the gradient of a row needs.
template <typename A>
struct PullbackSums {
  A wdy_xhat;
  A wdy;

  FUSED_OP_HD void add(A grad, A xhat) {
    wdy_xhat = multiply_add(grad, xhat, wdy_xhat);
    wdy += grad;
  }
};

// The linear map of a row from wdy and x̂ to dx. The mean of wdy is subtracted first, so a row of
// one column has a gradient of exactly zero.
template <typename Norm, typename A>
struct Pullback {
  A rstd;
  A mean_wdy;
  A along_xhat;

  FUSED_OP_HD Pullback(const PullbackSums<A>& sums, const Normalizer<A>& n, A inverse_cols)
      : rstd(n.true_rstd()),
        mean_wdy(sums.wdy * inverse_cols),
        along_xhat((Norm::kOfMean ? sums.wdy_xhat * inverse_cols : sums.wdy_xhat) * rstd) {}

  FUSED_OP_HD A operator()(A wdy, A xhat) const {
    const A centered = Norm::kCentered ? wdy - mean_wdy : wdy;
    return multiply_add(-xhat, along_xhat, centered * rstd);
  }
};
template <typename A>
struct Pullback<Identity, A> {
  FUSED_OP_HD Pullback(const PullbackSums<A>&, const Normalizer<A>&, A) {}
  FUSED_OP_HD A operator()(A wdy, A) const { return wdy; }
};

}  // namespace fused_op
