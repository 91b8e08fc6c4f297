// Epilogues: what becomes of the normalised value x̂, and what of the gradient on its way back. An
// epilogue is one struct; the element types of its streams are template arguments. Torch-free.
//
//   load()   the parameters of one pack
//   apply()  x̂ to y, in place: of a lane's packs 0, 1, 2 and so on
//
// Backward is the way back, of one row like the epilogue itself.
//
//   load()      what it needs of the parameters of one pack
//   pullback()  x̂ and dy to the gradient of x̂; adds to `sums` what the parameters' gradients gain
//   recover()   y to x̂, in place, where kFromOutput: backward then reads y and not x
#pragma once

#include <type_traits>

#include "core/convert.h"
#include "core/dropout.h"
#include "core/norm_args.h"
#include "core/norm_math.h"

namespace fused_op {

// The gradients of the parameters at N columns, summed over rows.
template <int N, typename A>
struct ParameterSums {
  A weight[N];
  A bias[N];
};

// y = dropout(x̂ · weight + bias); RMSNorm has no bias. An absent weight is 1, an absent bias 0.
// With kRecovers, backward takes x̂ from y.
template <typename W, typename Y, bool kDropout = false, bool kRecovers = false>
struct Affine {
  using Output = Y;

  template <int N>
  struct Parameters {
    Pack<W, N> weight;
    Pack<W, N> bias;
  };

  const NormForwardArgs& args;
  DropoutPacks mask;

  template <typename Lane>
  FUSED_OP_HD Affine(const NormForwardArgs& call, std::int64_t row, const Lane& lane)
      : args(call), mask(kDropout ? call.dropout : Dropout{}, row, lane.first, Lane::kStep) {}

  // Columns `col` to col + N of the parameters, where `inside`.
  template <typename Norm, typename Access, int N, typename Col>
  FUSED_OP_HD static Parameters<N> load(const NormForwardArgs& args, Col col, bool inside) {
    Parameters<N> parameters;
    parameters.weight = Access::template parameter<W, N>(args.weight, col, inside, 1);
    if constexpr (Norm::kCentered) {
      parameters.bias = Access::template parameter<W, N>(args.bias, col, inside, 0);
    }
    return parameters;
  }

  template <typename Norm, int N, typename A>
  FUSED_OP_HD void apply(const Parameters<N>& parameters, int i, A (&values)[N]) {
    A weight[N], bias[N];
    to_values(parameters.weight, weight);
    if constexpr (Norm::kCentered) {
      to_values(parameters.bias, bias);
    }
    for (int j = 0; j < N; ++j) {
      values[j] =
          Norm::kCentered ? multiply_add(values[j], weight[j], bias[j]) : values[j] * weight[j];
    }
    if constexpr (kDropout) {
      mask.apply(args.dropout, i, values);
    }
  }

  struct Backward {
    static_assert(!kDropout || !kRecovers, "what is dropped cannot be recovered");
    static constexpr bool kFromOutput = kRecovers;
    using Parameter = W;  // the dtype of the parameters' gradients

    template <int N>
    struct Weight {
      Pack<W, N> weight;
    };
    template <int N>
    struct WeightAndBias {
      Pack<W, N> weight;
      Pack<W, N> bias;
    };
    template <int N>
    using Parameters = std::conditional_t<kRecovers, WeightAndBias<N>, Weight<N>>;

    const NormBackwardArgs& args;
    DropoutRow mask;

    FUSED_OP_HD Backward(const NormBackwardArgs& call, std::int64_t row)
        : args(call), mask(kDropout ? DropoutState(call.dropout) : DropoutState(Dropout{}), row) {}

    template <typename Norm, typename Access, int N, typename Col>
    FUSED_OP_HD static Parameters<N> load(const NormBackwardArgs& args, Col col, bool inside) {
      Parameters<N> parameters;
      parameters.weight = Access::template parameter<W, N>(args.weight, col, inside, 1);
      if constexpr (kRecovers) {
        parameters.bias = Access::template parameter<W, N>(args.bias, col, inside, 0);
      }
      return parameters;
    }

    // `dy` may change: it is the caller's own.
    template <typename Norm, int N, typename A, typename Col>
    FUSED_OP_HD void pullback(const Parameters<N>& parameters, Col col, const A (&xhat)[N],
                              A (&dy)[N], A (&grad_xhat)[N], ParameterSums<N, A>& sums) const {
      if constexpr (kDropout) {
        mask.apply(args.dropout, col, dy);
      }
      to_values(parameters.weight, grad_xhat);
      for (int j = 0; j < N; ++j) {
        grad_xhat[j] *= dy[j];
        sums.weight[j] = multiply_add(dy[j], xhat[j], sums.weight[j]);
        if constexpr (Norm::kCentered) {
          sums.bias[j] += dy[j];
        }
      }
    }

    template <typename Norm, int N, typename A>
    FUSED_OP_HD void recover(const Parameters<N>& parameters, A (&values)[N]) const {
      A weight[N], bias[N];
      to_values(parameters.weight, weight);
      to_values(parameters.bias, bias);
      for (int j = 0; j < N; ++j) {
        const A smallest = copysign(static_cast<A>(kSmallestWeight), weight[j]);
        const bool small = fabs(weight[j]) < static_cast<A>(kSmallestWeight);
        values[j] = (Norm::kCentered ? values[j] - bias[j] : values[j]) *
                    inverse(small ? smallest : weight[j]);
      }
    }
  };
};

}  // namespace fused_op
