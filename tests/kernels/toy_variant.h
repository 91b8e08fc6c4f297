// A source and an epilogue that csrc/ does not know: all that a variant needs, one struct each.
// Read them beside core/source.h and core/epilogue.h, whose order they keep. Compiled by NVRTC in
// toy_variant.py.
#pragma once

#include "core/convert.h"
#include "core/epilogue.h"
#include "core/norm_args.h"
#include "core/source.h"

namespace toy {

using namespace fused_op;

// The row is 2 · input, rounded to S and stored. Backward reads it as x.
template <typename X, typename S = X>
struct Scale2 {
  using Row = S;
  using Input = X;

  template <int N, int kVectors>
  struct Loaded {
    Pack<X, N> input[kVectors];
  };

  const X* input;
  S* scaled;

  FUSED_OP_HD Scale2(const NormForwardArgs& args, std::int64_t row)
      : input(first_of<X, false>(args.input, row)),
        scaled(static_cast<S*>(args.sum) + row * args.cols) {}

  FUSED_OP_HD const Row* row() const { return scaled; }

  template <typename Access, int kVectors, typename Lane>
  FUSED_OP_HD void prefetch(const Lane& lane) const {
    Access::template prefetch_row<kVectors>(lane, input);
  }
  template <typename Access, typename Lane, int N, int kVectors>
  FUSED_OP_HD void load(const Lane& lane, Loaded<N, kVectors>& loaded) const {
    Access::load(lane, input, loaded.input);
  }
  template <typename Access, typename Lane, int N, int kVectors>
  FUSED_OP_HD void read(const Lane& lane, Pack<Row, N> (&row)[kVectors]) const {
    Access::load(lane, scaled, row);
  }
  template <typename Access, typename Lane, int N, int kVectors>
  FUSED_OP_HD void finish(const Lane& lane, const Loaded<N, kVectors>& loaded,
                          Pack<Row, N> (&row)[kVectors]) const {
    for (int i = 0; i < kVectors; ++i) {
      Accumulator<S> values[N];
      to_values(loaded.input[i], values);
      for (int j = 0; j < N; ++j) {
        values[j] *= 2;
      }
      row[i] = rounded<S>(values);
    }
    Access::store(lane, scaled, row);
  }

  // The gradient of the input is 2 · dx. All else is as in Plain.
  struct Backward : Plain<X>::Backward {
    using Plain<X>::Backward::Backward;

    template <typename Gradients, int N, typename A, typename Col>
    FUSED_OP_HD void leave(Col col, A (&dx)[N], int k, Gradients& gradients) const {
      for (int j = 0; j < N; ++j) {
        dx[j] *= 2;
      }
      Plain<X>::Backward::leave(col, dx, k, gradients);
    }
  };
};

// y = cap · tanh(z / cap), z = x̂ · weight + bias. The cap is a constant of the kernel.
template <typename W, typename Y, int kCap>
struct SoftCap {
  using Args = NormForwardArgs;
  using Output = Y;
  using Inner = Affine<W, Y>;

  template <int N>
  using Parameters = typename Inner::template Parameters<N>;
  template <int N, int kVectors>
  using Beside = typename Inner::template Beside<N, kVectors>;

  Inner inner;

  template <typename Lane>
  FUSED_OP_HD SoftCap(const NormForwardArgs& args, std::int64_t row, const Lane& lane)
      : inner(args, row, lane) {}

  template <typename Access, typename Lane, int N, int kVectors>
  FUSED_OP_HD static void load_beside(const NormForwardArgs&, std::int64_t, const Lane&,
                                      Beside<N, kVectors>&) {}
  template <typename Norm, typename Access, int N, typename Col, typename Before = Absent>
  FUSED_OP_HD static Parameters<N> load(const NormForwardArgs& args, std::int64_t row, Col col,
                                        int valid, const Before& before = {}) {
    return Inner::template load<Norm, Access, N>(args, row, col, valid, before);
  }

  template <typename A>
  FUSED_OP_HD static A squashed(A z) {
    return tanh(z / A(kCap));
  }

  template <typename Norm, int N, int kVectors, typename A>
  FUSED_OP_HD void apply(const Parameters<N>& parameters, const Beside<N, kVectors>& beside, int i,
                         A (&values)[N]) {
    inner.template apply<Norm>(parameters, beside, i, values);
    for (int j = 0; j < N; ++j) {
      values[j] = A(kCap) * squashed(values[j]);
    }
  }

  // The gradient of z is dy · (1 - tanh²). From there on, the gradients are those of Inner. Unlike
  // Inner's, this backward needs the bias.
  struct Backward {
    using Args = NormBackwardArgs;
    static constexpr bool kFromOutput = false;
    static constexpr bool kGrouped = false;
    static constexpr bool kEntries = false;
    static constexpr bool kReadsBeside = false;
    using Parameter = W;

    template <int N>
    struct Parameters {
      typename Inner::Backward::template Parameters<N> inner;
      Pack<W, N> bias;
    };

    typename Inner::Backward inner;

    FUSED_OP_HD Backward(const NormBackwardArgs& args, std::int64_t row) : inner(args, row) {}

    template <typename Norm, typename Access, int N, typename Col>
    FUSED_OP_HD static Parameters<N> load(const NormBackwardArgs& args, std::int64_t row, Col col,
                                          int valid) {
      return {Inner::Backward::template load<Norm, Access, N>(args, row, col, valid),
              Access::template parameter<W, N>(args.bias, col, valid, 0)};
    }

    template <typename Norm, int N, typename A, typename Col>
    FUSED_OP_HD void pullback(const Parameters<N>& parameters, Col col, const A (&xhat)[N],
                              A (&dy)[N], A (&grad_xhat)[N], ParameterSums<N, A>& sums) const {
      A weight[N], bias[N];
      to_values(parameters.inner.weight, weight);
      to_values(parameters.bias, bias);
      for (int j = 0; j < N; ++j) {
        const A z = xhat[j] * weight[j] + (Norm::kCentered ? bias[j] : A(0));
        const A t = squashed(z);
        dy[j] *= 1 - t * t;
      }
      inner.template pullback<Norm>(parameters.inner, col, xhat, dy, grad_xhat, sums);
    }
  };
};

}  // namespace toy
