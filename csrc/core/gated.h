// The gated RMS norm, norm(x)·weight·φ(z) or norm(x·φ(z))·weight: its arguments and formulas for
// both backends, and the structs of its kernels. φ is silu or sigmoid. Torch-free.
//
// With the norm first, the gate is an epilogue around Affine. With the gate first, it is a source.
// x·φ(z) is not rounded: its rows are accumulators, and backward computes them from x and z again.
//
// A kernel's row is one group of columns of a tensor's row. Each group has its own mean square and
// its own parameters; most calls have one group. With n = x̂·weight:
//
//   norm first:  dz = dy·n·φ'(z), and dy·φ(z) goes back through the norm
//   gate first:  dx = dv·φ(z), dz = dv·x·φ'(z), where dv is the gradient of v = x·φ(z)
#pragma once

#include <cmath>
#include <type_traits>

#include "core/epilogue.h"
#include "core/norm_args.h"
#include "core/source.h"

namespace fused_op {

struct Gate {
  ConstRows rows;
  bool sigmoid = false;  // φ is sigmoid; else silu
  bool first = false;    // the gate comes before the norm
  int groups = 1;        // in a row of the tensors
  RowSplit group;        // of a row of the kernel: where its parameters begin
};

// `rows`, `cols` and the statistics count groups. `dtype` is that of the input. With the gate
// first, the rows that are normalised are accumulators.
struct GatedForwardArgs : NormForwardArgs {
  Gate gate;
};
struct GatedBackwardArgs : NormBackwardArgs {
  Gate gate;
  Rows grad_gate;  // null: not wanted
  int groups = 1;  // the same as gate.groups
};

// φ(z) and φ'(z).
template <typename A>
struct Activation {
  A value;
  A slope;
};

// Computed from σ(z) and σ(-z).
template <bool kSigmoid, typename A>
FUSED_OP_HD Activation<A> activation(A z, A sigma, A rest) {
  if (kSigmoid) {
    return {sigma, sigma * rest};
  }
  return {z * sigma, multiply_add(z * sigma, rest, sigma)};
}
// Coarse: the GPU's own exponential and reciprocal, which take a third of the instructions. Results
// of 16 bits do not show the few units in the last place that this costs, except where each of them
// has to be that of another implementation. Share of copy without and with, gate first: 0.92 1.03
// at 1048576x128 (H200, bf16).
template <bool kSigmoid, bool kCoarse = false, typename A>
FUSED_OP_HD Activation<A> activation(A z) {
#ifdef __CUDA_ARCH__
  if constexpr (kCoarse) {
    float e, sigma;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(z * -1.442695041f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigma) : "f"(1.0f + e));
    const float rest = kSigmoid && z > 0.0f ? e * sigma : 1.0f - sigma;  // silu adds it to a sum
    return activation<kSigmoid>(z, sigma, rest);
  }
#endif
  const A e = exp(z < A(0) ? z : -z);
  const A larger = reciprocal(A(1) + e);  // the larger of σ(z) and σ(-z); neither overflows
  const A smaller = e * larger;
  const bool negative = z < A(0);
  return activation<kSigmoid>(z, negative ? smaller : larger, negative ? larger : smaller);
}

// silu(z), and its derivative, for results of type E.
template <typename E, typename A>
FUSED_OP_HD Activation<A> silu(A z) {
  return activation<false, sizeof(E) == 2>(z);
}

// Affine for a row that is one of several groups.
template <typename W, typename Y, bool kGroups>
struct GroupAffine : Affine<W, Y> {
  using Args = GatedForwardArgs;
  using Inner = Affine<W, Y>;
  using Inner::Inner;

  template <typename Norm, typename Access, int N, typename Col, typename Before = Absent>
  FUSED_OP_HD static auto load(const Args& args, std::int64_t row, Col col, int valid,
                               const Before& before = {}) {
    const int first = kGroups ? static_cast<int>(args.gate.group.offset(row, args.cols)) : 0;
    return Inner::template load<Norm, Access, N>(args, row, first + col, valid, before);
  }

  struct Backward : Affine<W, Y>::Backward {
    using Args = GatedBackwardArgs;
    static constexpr bool kGrouped = kGroups;
    using Affine<W, Y>::Backward::Backward;

    template <typename Norm, typename Access, int N, typename Col>
    FUSED_OP_HD static auto load(const Args& args, std::int64_t row, Col col, int valid) {
      const int first = kGroups ? static_cast<int>(args.gate.group.offset(row, args.cols)) : 0;
      return Affine<W, Y>::Backward::template load<Norm, Access, N>(args, row, first + col, valid);
    }
  };
};

// y = n · φ(z), n = x̂ · weight. With kRounds, x̂ is rounded to T first, and so is n if the weight
// has 16 bits: the result of `weight * normalized.to(dtype)` before a gate in float32.
template <typename W, typename T, typename Z, bool kSigmoid, bool kRounds, bool kGroups,
          bool kSplit>
struct GatedAffine : GroupAffine<W, T, kGroups> {
  using Inner = GroupAffine<W, T, kGroups>;
  using Inner::Inner;
  static constexpr bool kCoarse = !kRounds && sizeof(T) == 2 && sizeof(Z) == 2;

  template <int N, int kVectors>
  struct Beside {
    Pack<Z, N> gate[kVectors];
  };

  // Computes n from x̂.
  template <int N, typename Parameters, typename A>
  FUSED_OP_HD static void scale(const Parameters& parameters, const A (&xhat)[N], A (&n)[N]) {
    A met[N];
    for (int j = 0; j < N; ++j) {
      met[j] = xhat[j];
    }
    if constexpr (kRounds) {
      to_values(rounded<T>(xhat), met);
    }
    to_values(parameters.weight, n);
    for (int j = 0; j < N; ++j) {
      n[j] *= met[j];
    }
    if constexpr (kRounds && sizeof(W) == 2) {
      to_values(rounded<T>(n), n);
    }
  }

  template <typename Access, typename Lane, int N, int kVectors>
  FUSED_OP_HD static void load_beside(const GatedForwardArgs& args, std::int64_t row,
                                      const Lane& lane, Beside<N, kVectors>& beside) {
    Access::load(lane, first_of<Z, kSplit>(args.gate.rows, row), beside.gate);
  }
  template <typename Norm, int N, int kVectors, typename Parameters, typename A>
  FUSED_OP_HD void apply(const Parameters& parameters, const Beside<N, kVectors>& beside, int i,
                         A (&values)[N]) {
    A gate[N], n[N];
    to_values(beside.gate[i], gate);
    scale(parameters, values, n);
    for (int j = 0; j < N; ++j) {
      values[j] = n[j] * activation<kSigmoid, kCoarse>(gate[j]).value;
    }
  }

  struct Backward : Inner::Backward {
    static constexpr bool kReadsBeside = true;
    using BesideRow = Z;

    const GatedBackwardArgs& call;
    std::int64_t row;

    FUSED_OP_HD Backward(const GatedBackwardArgs& args, std::int64_t number)
        : Inner::Backward(args, number), call(args), row(number) {}

    FUSED_OP_HD static const ConstRows& beside(const GatedBackwardArgs& args) {
      return args.gate.rows;
    }
    template <typename Norm, int N, typename Parameters, typename A, typename Col>
    FUSED_OP_HD void pullback(const Parameters& parameters, Col col, const A (&xhat)[N], A (&dy)[N],
                              Pack<Z, N>& beside, A (&grad_xhat)[N],
                              ParameterSums<N, A>& sums) const {
      A gate[N], n[N], met[N];
      to_values(beside, gate);
      scale(parameters, xhat, n);
      for (int j = 0; j < N; ++j) {
        const Activation<A> at = activation<kSigmoid, kCoarse>(gate[j]);
        gate[j] = dy[j] * n[j] * at.slope;
        dy[j] *= at.value;
        met[j] = xhat[j];
      }
      beside = rounded<Z>(gate);
      if constexpr (kRounds) {
        to_values(rounded<T>(xhat), met);
      }
      Inner::Backward::template pullback<Norm>(parameters, col, met, dy, grad_xhat, sums);
    }
    template <typename Access, typename Lane, int N, int kCount>
    FUSED_OP_HD void store_beside(const Lane& lane, int first,
                                  const Pack<Z, N> (&gradients)[kCount]) const {
      if (call.grad_gate.data != nullptr) {
        Z* const gate = static_cast<Z*>(call.grad_gate.data) + row * lane.width;
        Access::store_some(lane, gate, first, gradients);
      }
    }
  };
};

// The row is x · φ(z), in accumulators. With kRounds, the epilogue rounds x̂ as another
// implementation does, and φ is exact for its sake.
template <typename X, typename Z, bool kSigmoid, bool kRounds, bool kSplit>
struct GatedInput {
  using Row = Accumulator<X>;
  using Input = X;
  static constexpr bool kCoarse = !kRounds && sizeof(X) == 2 && sizeof(Z) == 2;

  template <int N, int kVectors>
  struct Loaded {
    Pack<X, N> input[kVectors];
    Pack<Z, N> gate[kVectors];
  };

  const X* input;
  const Z* gate;

  FUSED_OP_HD GatedInput(const GatedForwardArgs& args, std::int64_t row)
      : input(first_of<X, kSplit>(args.input, row)),
        gate(first_of<Z, kSplit>(args.gate.rows, row)) {}

  template <typename Access, int kVectors, typename Lane>
  FUSED_OP_HD void prefetch(const Lane& lane) const {
    Access::template prefetch_row<kVectors>(lane, input);
    Access::template prefetch_row<kVectors>(lane, gate);
  }
  template <typename Access, typename Lane, int N, int kVectors>
  FUSED_OP_HD void load(const Lane& lane, Loaded<N, kVectors>& loaded) const {
    Access::load_both(lane, input, loaded.input, gate, loaded.gate);
  }
  template <typename Access, typename Lane, int N, int kVectors>
  FUSED_OP_HD void read(const Lane& lane, Pack<Row, N> (&row)[kVectors]) const {
    Loaded<N, kVectors> loaded;
    load<Access>(lane, loaded);
    finish<Access>(lane, loaded, row);
  }
  template <typename Access, typename Lane, int N, int kVectors>
  FUSED_OP_HD void finish(const Lane&, const Loaded<N, kVectors>& loaded,
                          Pack<Row, N> (&row)[kVectors]) const {
    for (int i = 0; i < kVectors; ++i) {
      Row values[N];
      to_values(loaded.input[i], values);
      Backward::combine(loaded.gate[i], values);
      row[i] = rounded<Row>(values);
    }
  }

  struct Backward {
    static constexpr bool kAtTwoStrides = kSplit;
    static constexpr bool kReadsSum = false;
    static constexpr bool kReadsBeside = true;
    using Saved = X;
    using GradSum = Row;
    using BesideRow = Z;

    template <int N, int kCount>
    struct Gradients {
      Pack<X, N> input[kCount];
      Pack<Z, N> gate[kCount];
    };

    const GatedBackwardArgs& args;
    std::int64_t row;

    FUSED_OP_HD Backward(const GatedBackwardArgs& call, std::int64_t number)
        : args(call), row(number) {}

    FUSED_OP_HD static const ConstRows& beside(const GatedBackwardArgs& args) {
      return args.gate.rows;
    }
    template <int N, typename A>
    FUSED_OP_HD static void combine(const Pack<Z, N>& gate_pack, A (&x)[N]) {
      A gate[N];
      to_values(gate_pack, gate);
      for (int j = 0; j < N; ++j) {
        x[j] *= activation<kSigmoid, kCoarse>(gate[j]).value;
      }
    }
    FUSED_OP_HD static bool sum_arrives(const NormBackwardArgs&) { return false; }
    FUSED_OP_HD static bool wanted(const GatedBackwardArgs& args) {
      return args.grad_input.data != nullptr || args.grad_gate.data != nullptr;
    }
    template <int N, int kCount, typename A>
    FUSED_OP_HD void leave(const Pack<X, N>& x_pack, const Pack<Z, N>& gate_pack, A (&dv)[N], int k,
                           Gradients<N, kCount>& gradients) const {
      A x[N], gate[N];
      to_values(x_pack, x);
      to_values(gate_pack, gate);
      for (int j = 0; j < N; ++j) {
        const Activation<A> at = activation<kSigmoid, kCoarse>(gate[j]);
        x[j] *= dv[j] * at.slope;
        gate[j] = dv[j] * at.value;
      }
      gradients.input[k] = rounded<X>(gate);
      gradients.gate[k] = rounded<Z>(x);
    }
    template <typename Access, typename Lane, int N, int kCount>
    FUSED_OP_HD void store(const Lane& lane, int first,
                           const Gradients<N, kCount>& gradients) const {
      if (args.grad_input.data != nullptr) {
        X* const input = static_cast<X*>(args.grad_input.data) + row * lane.width;
        Access::store_some(lane, input, first, gradients.input);
      }
      if (args.grad_gate.data != nullptr) {
        Z* const gate = static_cast<Z*>(args.grad_gate.data) + row * lane.width;
        Access::store_some(lane, gate, first, gradients.gate);
      }
    }
  };
};

}  // namespace fused_op
