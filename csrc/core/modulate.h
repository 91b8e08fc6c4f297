// The structs of the kernels of core/modulated.h: a source and three epilogues. Torch-free.
//
// If each row has an entry of its own, both directions read it beside the row, and the gradients of
// entries are rows, too. If rows share entries, these are parameters of the kernels. Forward loads
// them like weight and bias; entries that begin in the middle of a word it reads beside the row. A
// CTA of backward takes rows of one entry, with weight' as parameter, and the sums over its rows
// are stored like the parameter gradients of a norm.
#pragma once

#include <type_traits>

#include "core/epilogue.h"
#include "core/modulated.h"
#include "core/source.h"

namespace fused_op {

// The row is residual + gate · input, rounded to X and stored as the next residual. The statistics
// are those of the stored sum, as in AddResidual.
template <typename I, typename X, typename G>
struct GatedResidual {
  using Row = X;
  using Input = I;

  template <int N, int kVectors>
  struct Loaded {
    Pack<I, N> input[kVectors];
    Pack<X, N> residual[kVectors];
    Pack<G, N> gate[kVectors];
  };

  const I* input;
  const X* residual;
  const G* gate;
  X* sum;

  FUSED_OP_HD GatedResidual(const ModulatedForwardArgs& args, std::int64_t row)
      : input(first_of<I, false>(args.input, row)),
        residual(first_of<X, false>(args.residual, row)),
        gate(first_of<G, true>(args.modulation.gate, row)),
        sum(static_cast<X*>(args.sum) + row * args.cols) {}

  FUSED_OP_HD const Row* row() const { return sum; }

  template <typename Access, int kVectors, typename Lane>
  FUSED_OP_HD void prefetch(const Lane& lane) const {
    Access::template prefetch_row<kVectors>(lane, input);
    Access::template prefetch_row<kVectors>(lane, residual);
  }
  template <typename Access, typename Lane, int N, int kVectors>
  FUSED_OP_HD void load(const Lane& lane, Loaded<N, kVectors>& loaded) const {
    Access::load_both(lane, input, loaded.input, residual, loaded.residual);
    Access::load(lane, gate, loaded.gate);
  }
  template <typename Access, typename Lane, int N, int kVectors>
  FUSED_OP_HD void read(const Lane& lane, Pack<Row, N> (&row)[kVectors]) const {
    Access::load(lane, sum, row);
  }
  template <typename Access, typename Lane, int N, int kVectors>
  FUSED_OP_HD void finish(const Lane& lane, const Loaded<N, kVectors>& loaded,
                          Pack<Row, N> (&row)[kVectors]) const {
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < kVectors; ++i) {
      Accumulator<X> branch[N], total[N], factor[N];
      to_values(loaded.input[i], branch);
      to_values(loaded.residual[i], total);
      to_values(loaded.gate[i], factor);
      for (int j = 0; j < N; ++j) {
        total[j] = multiply_add(factor[j], branch[j], total[j]);
      }
      row[i] = rounded<X>(total);
    }
    Access::store(lane, sum, row);
  }
};

// n to n · (1 + scale) + shift.
template <bool kShift, typename Z, int N, typename A>
FUSED_OP_HD void modulate(const Pack<Z, N>& scale, const Pack<Z, N>& shift, A (&values)[N]) {
  A factor[N], offset[N] = {};
  to_values(scale, factor);
  if constexpr (kShift) {
    to_values(shift, offset);
  }
  for (int j = 0; j < N; ++j) {
    values[j] = multiply_add(values[j], A(1) + factor[j], offset[j]);
  }
}

// y = (x̂ · weight + bias) · (1 + scale) + shift, for rows with an entry each.
template <typename W, typename Y, typename Z, bool kShift, bool kBias>
struct Modulated : Affine<W, Y> {
  using Inner = Affine<W, Y>;
  using Args = ModulatedForwardArgs;
  using Inner::Inner;

  template <int N, int kVectors>
  struct Beside {
    Pack<Z, N> scale[kVectors];
    Pack<Z, N> shift[kShift ? kVectors : 1];
  };

  template <typename Access, typename Lane, int N, int kVectors>
  FUSED_OP_HD static void load_beside(const ModulatedForwardArgs& args, std::int64_t row,
                                      const Lane& lane, Beside<N, kVectors>& beside) {
    Access::load(lane, first_of<Z, true>(args.modulation.scale, row), beside.scale);
    if constexpr (kShift) {
      Access::load(lane, first_of<Z, true>(args.modulation.shift, row), beside.shift);
    }
  }
  template <typename Norm, int N, int kVectors, typename Parameters, typename A>
  FUSED_OP_HD void apply(const Parameters& parameters, const Beside<N, kVectors>& beside, int i,
                         A (&values)[N]) {
    const typename Inner::template Beside<N, kVectors> nothing{};
    Inner::template apply<Norm>(parameters, nothing, i, values);
    modulate<kShift>(beside.scale[i], beside.shift[kShift ? i : 0], values);
  }

  // dscale = dy · n is stored as a row beside. (dshift is dy.)
  struct Backward : Inner::Backward {
    using InnerBackward = typename Inner::Backward;
    using Args = ModulatedBackwardArgs;
    static constexpr bool kReadsBeside = true;
    using BesideRow = Z;

    template <int N>
    struct WeightAndBias {
      Pack<W, N> weight;
      Pack<W, N> bias;
    };
    template <int N>
    using Parameters =
        std::conditional_t<kBias, WeightAndBias<N>, typename InnerBackward::template Parameters<N>>;

    const ModulatedBackwardArgs& call;
    std::int64_t row;

    FUSED_OP_HD Backward(const ModulatedBackwardArgs& args, std::int64_t number)
        : InnerBackward(args, number), call(args), row(number) {}

    FUSED_OP_HD static const ConstRows& beside(const ModulatedBackwardArgs& args) {
      return args.modulation.scale;
    }
    template <typename Norm, typename Access, int N, typename Col>
    FUSED_OP_HD static Parameters<N> load(const NormBackwardArgs& args, std::int64_t, Col col,
                                          int valid) {
      Parameters<N> parameters;
      parameters.weight = Access::template parameter<W, N>(args.weight, col, valid, 1);
      if constexpr (kBias) {
        parameters.bias = Access::template parameter<W, N>(args.bias, col, valid, 0);
      }
      return parameters;
    }
    template <typename Norm, int N, typename A, typename Col>
    FUSED_OP_HD void pullback(const Parameters<N>& parameters, Col col, const A (&xhat)[N],
                              A (&dy)[N], Pack<Z, N>& beside, A (&grad_xhat)[N],
                              ParameterSums<N, A>& sums) const {
      A factor[N], weight[N], n[N], bias[N] = {}, modulated[N];
      to_values(beside, factor);
      to_values(parameters.weight, weight);
      if constexpr (kBias) {
        to_values(parameters.bias, bias);
      }
      for (int j = 0; j < N; ++j) {
        factor[j] += A(1);
        n[j] = dy[j] * multiply_add(weight[j], xhat[j], bias[j]);
        modulated[j] = dy[j] * factor[j];
      }
      beside = rounded<Z>(n);
      const typename InnerBackward::template Parameters<N> inner{parameters.weight};
      InnerBackward::template pullback<Norm>(inner, col, xhat, modulated, grad_xhat, sums);
      for (int j = 0; j < N; ++j) {
        grad_xhat[j] = dy[j] * (weight[j] * factor[j]);  // rounded as with shared entries
      }
    }
    template <typename Access, typename Lane, int N, int kCount>
    FUSED_OP_HD void store_beside(const Lane& lane, int first,
                                  const Pack<Z, N> (&gradients)[kCount]) const {
      if (call.grad_scale.data != nullptr) {
        Z* const scale = static_cast<Z*>(call.grad_scale.data) + row * lane.width;
        Access::store_some(lane, scale, first, gradients);
      }
    }
  };
};

// The same for rows that share entries. Share of copy if these are read beside the row, and so:
// 0.88 0.95 at 131072x1024, 0.74 0.97 at 32768x4096, 0.68 0.94 at 16384x8192 (H200, bf16, 8
// entries).
template <typename W, typename Y, typename Z, bool kShift, bool kAffine>
struct ModulatedByEntry : Affine<W, Y> {
  using Inner = Affine<W, Y>;
  using Args = ModulatedForwardArgs;
  using Inner::Inner;

  struct Nothing {};
  template <int N>
  struct Parameters {
    std::conditional_t<kAffine, typename Inner::template Parameters<N>, Nothing> inner;
    Pack<Z, N> scale;
    Pack<Z, N> shift;
  };

  template <typename Norm, typename Access, int N, typename Col, typename... Before>
  FUSED_OP_HD static Parameters<N> load(const Args& args, std::int64_t row, Col col, int valid,
                                        const Before&...) {  // scale and shift are never absent
    const Modulation& entries = args.modulation;
    Parameters<N> parameters;
    if constexpr (kAffine) {
      parameters.inner = Inner::template load<Norm, Access, N>(args, row, col, valid);
    }
    parameters.scale =
        Access::template parameter<Z, N>(first_of<Z, true>(entries.scale, row), col, valid, 0);
    if constexpr (kShift) {
      parameters.shift =
          Access::template parameter<Z, N>(first_of<Z, true>(entries.shift, row), col, valid, 0);
    }
    return parameters;
  }
  template <typename Norm, int N, typename Beside, typename A>
  FUSED_OP_HD void apply(const Parameters<N>& parameters, const Beside& beside, int i,
                         A (&values)[N]) {
    if constexpr (kAffine) {
      Inner::template apply<Norm>(parameters.inner, beside, i, values);
    }
    modulate<kShift>(parameters.scale, parameters.shift, values);
  }
};

// Backward of rows that share entries. The sums are W and B of each entry. Without a weight, the
// parameter is scale itself: P is Z, W is the gradient of scale and B that of shift. With one, it
// is weight', in accumulators. kGate: the factor is the entry itself, not 1 + scale.
template <typename P, typename Y, typename Z, bool kWeight, bool kGate>
struct ModulatedEntries {
  using Output = Y;

  struct Backward : Affine<P, Y>::Backward {
    using Inner = typename Affine<P, Y>::Backward;
    using Args = ModulatedBackwardArgs;
    static constexpr bool kGrouped = true;
    static constexpr bool kEntries = true;
    using Inner::Inner;

    template <int N>
    using Parameters = typename Inner::template Parameters<N>;

    template <typename Norm, typename Access, int N, typename Col>
    FUSED_OP_HD static Parameters<N> load(const ModulatedBackwardArgs& args, std::int64_t row,
                                          Col col, int valid) {
      const std::int64_t last = args.rows - 1;  // lanes exist for rows past it, too
      const Z* const entry = first_of<Z, true>(args.modulation.scale, row < last ? row : last);
      const Pack<Z, N> scale = Access::template parameter<Z, N>(entry, col, valid, 0);
      if constexpr (!kWeight) {
        return {scale};
      } else {
        Accumulator<P> factor[N], weight[N];
        to_values(scale, factor);
        to_values(Access::template parameter<P, N>(args.weight, col, valid, 1), weight);
        for (int j = 0; j < N; ++j) {
          weight[j] *= 1 + factor[j];
        }
        return {rounded<P>(weight)};
      }
    }
    template <typename Norm, int N, typename A, typename Col>
    FUSED_OP_HD void pullback(const Parameters<N>& parameters, Col, const A (&xhat)[N], A (&dy)[N],
                              A (&grad_xhat)[N], ParameterSums<N, A>& sums) const {
      to_values(parameters.weight, grad_xhat);
      for (int j = 0; j < N; ++j) {
        grad_xhat[j] = dy[j] * (kWeight || kGate ? grad_xhat[j] : 1 + grad_xhat[j]);
        sums.weight[j] = multiply_add(dy[j], xhat[j], sums.weight[j]);
        if constexpr (Norm::kHasBias) {
          sums.bias[j] += dy[j];
        }
      }
    }
  };
};

}  // namespace fused_op
