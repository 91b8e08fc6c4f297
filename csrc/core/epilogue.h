// Epilogues: what happens to the normalised value x̂, and to the gradient on its way back. An
// epilogue is one struct; its template arguments are the element types of its streams. Torch-free.
//
//   Args               what the kernel takes: NormForwardArgs, or a struct derived from it
//   load()             the parameters of one pack of a row. It may be given those of another pack,
//                      and keep what is absent: the GPU then need not set it again
//   Beside             the packs of a lane that are read beside x̂, from rows of the epilogue's own
//   load_beside()      starts the loads of Beside, together with those of the row
//   apply()            x̂ to y, in place; called for packs 0, 1, 2 and so on of a lane
//   kInHalves          optional: whether it prefers two packs at once that lie half a row apart.
//                      Where the layout of a row allows it, apply_to_halves() then takes the place
//                      of apply(), and rounds what it returns
//   normalizer         a member that only epilogues have which also normalise other elements
//                      of the row
//
// Its struct Backward is the way back. Like the epilogue, it is made for one row.
//
//   Args           NormBackwardArgs, or a struct derived from it
//   kGrouped       whether rows have different parameters: row r has those of group r % groups.
//                  With kEntries, neighbouring rows share an entry instead (core/modulated.h)
//   kReadsBeside   whether it reads rows of its own: beside() returns them, as BesideRow, and
//                  store_beside() stores their gradients
//   load()         what it needs of the parameters of one pack of a row
//   pullback()     x̂ and dy to the gradient of x̂. Adds to `sums` what this pack contributes to
//                  the parameter gradients, and replaces a pack of the rows beside by its gradient
//   recover()      y to x̂, in place, with kFromOutput: backward then reads y instead of x
//   kInHalves      optional, as above. pullback_halves() then takes the place of pullback(). It
//                  also takes what load_of_row() returned, as OfRow, whether the pack is in the
//                  second half, and dy of the other half
#pragma once

#include <type_traits>

#include "core/convert.h"
#include "core/dropout.h"
#include "core/norm_args.h"
#include "core/norm_math.h"

namespace fused_op {

// The parameter gradients at N columns, summed over rows.
template <int N, typename A>
struct ParameterSums {
  A weight[N];
  A bias[N];

  FUSED_OP_HD void clear() {
    for (int j = 0; j < N; ++j) {
      weight[j] = bias[j] = 0;
    }
  }
};

// Tells the normalizer of a row to an epilogue that has to know it.
template <typename Epilogue, typename A>
FUSED_OP_HD void tell(Epilogue& epilogue, const Normalizer<A>& normalizer) {
  if constexpr (requires { epilogue.normalizer; }) {
    epilogue.normalizer = normalizer;
  }
}

// Whether an epilogue, or its struct Backward, has kInHalves, and it is true.
template <typename Epilogue>
constexpr bool takes_halves() {
  if constexpr (requires { Epilogue::kInHalves; }) {
    return Epilogue::kInHalves;
  } else {
    return false;
  }
}

// The values of parameters that are absent.
struct Absent {
  float weight = 1;
  float bias = 0;
};

// y = dropout(x̂ · weight + bias). RMSNorm has no bias.
// With kRecovers, backward recovers x̂ from y.
template <typename W, typename Y, bool kDropout = false, bool kRecovers = false>
struct Affine {
  using Args = NormForwardArgs;
  using Output = Y;

  template <int N>
  struct Parameters {
    Pack<W, N> weight;
    Pack<W, N> bias;
  };

  template <int N, int kVectors>
  struct Beside {};

  const NormForwardArgs& args;
  DropoutPacks mask;

  template <typename Lane>
  FUSED_OP_HD Affine(const NormForwardArgs& call, std::int64_t row, const Lane& lane)
      : args(call), mask(kDropout ? call.dropout : Dropout{}, row, lane.first, Lane::kStep) {}

  template <typename Access, typename Lane, int N, int kVectors>
  FUSED_OP_HD static void load_beside(const NormForwardArgs&, std::int64_t, const Lane&,
                                      Beside<N, kVectors>&) {}

  // The parameters of columns `col` to col + N, of which the first `valid` are in the row. They are
  // the same for all rows. Where one is absent, its values are those of `before`, which may be what
  // was loaded for other columns.
  template <typename Norm, typename Access, int N, typename Col, typename Before = Absent>
  FUSED_OP_HD static Parameters<N> load(const NormForwardArgs& args, std::int64_t, Col col,
                                        int valid, const Before& before = {}) {
    if constexpr (kDropout && !std::is_same_v<Before, Absent>) {
      return load<Norm, Access, N>(args, 0, col, valid);  // kept beside the mask, they would spill
    } else {
      Parameters<N> parameters;
      parameters.weight = Access::template parameter<W, N>(args.weight, col, valid, before.weight);
      if constexpr (Norm::kHasBias) {
        parameters.bias = Access::template parameter<W, N>(args.bias, col, valid, before.bias);
      }
      return parameters;
    }
  }

  template <typename Norm, int N, int kVectors, typename A>
  FUSED_OP_HD void apply(const Parameters<N>& parameters, const Beside<N, kVectors>&, int i,
                         A (&values)[N]) {
    A weight[N], bias[N];
    to_values(parameters.weight, weight);
    if constexpr (Norm::kHasBias) {
      to_values(parameters.bias, bias);
    }
    for (int j = 0; j < N; ++j) {
      values[j] =
          Norm::kHasBias ? multiply_add(values[j], weight[j], bias[j]) : values[j] * weight[j];
    }
    if constexpr (kDropout) {
      mask.apply(args.dropout, i, values);
    }
  }

  struct Backward {
    static_assert(!kDropout || !kRecovers, "what is dropped cannot be recovered");
    using Args = NormBackwardArgs;
    static constexpr bool kFromOutput = kRecovers;
    static constexpr bool kGrouped = false;
    static constexpr bool kEntries = false;
    static constexpr bool kReadsBeside = false;
    using Parameter = W;  // the dtype of the parameter gradients

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
    FUSED_OP_HD static Parameters<N> load(const NormBackwardArgs& args, std::int64_t, Col col,
                                          int valid) {
      Parameters<N> parameters;
      parameters.weight = Access::template parameter<W, N>(args.weight, col, valid, 1);
      if constexpr (kRecovers) {
        parameters.bias = Access::template parameter<W, N>(args.bias, col, valid, 0);
      }
      return parameters;
    }

    // `dy` is the caller's own copy and may change.
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
        if constexpr (Norm::kHasBias) {
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
        values[j] = (Norm::kHasBias ? values[j] - bias[j] : values[j]) *
                    reciprocal(small ? smallest : weight[j]);
      }
    }
  };
};

// An epilogue whose x̂ is rounded to T first, as in a model's `xhat.to(dtype) * weight`. The caller
// of pullback() keeps the exact x̂, from which dx is computed.
template <typename Epilogue, typename T>
struct RoundsFirst : Epilogue {
  using Epilogue::Epilogue;

  template <typename Norm, int N, typename Parameters, typename Beside, typename A>
  FUSED_OP_HD void apply(const Parameters& parameters, const Beside& beside, int i,
                         A (&values)[N]) {
    to_values(rounded<T>(values), values);
    Epilogue::template apply<Norm>(parameters, beside, i, values);
  }

  struct Backward : Epilogue::Backward {
    using Epilogue::Backward::Backward;

    template <typename Norm, int N, typename Parameters, typename A, typename Col>
    FUSED_OP_HD void pullback(const Parameters& parameters, Col col, const A (&xhat)[N], A (&dy)[N],
                              A (&grad_xhat)[N], ParameterSums<N, A>& sums) const {
      A rounded_xhat[N];
      to_values(rounded<T>(xhat), rounded_xhat);
      Epilogue::Backward::template pullback<Norm>(parameters, col, rounded_xhat, dy, grad_xhat,
                                                  sums);
    }
  };
};

}  // namespace fused_op
