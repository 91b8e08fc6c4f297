// The types that say what a backward kernel computes, and the step that all of these kernels share:
// from a pack of x and dy to x̂ and its gradient. Compiled by nvcc and by NVRTC; torch-free.
#pragma once

#include <type_traits>

#include "core/convert.h"
#include "core/epilogue.h"
#include "core/norm_args.h"
#include "core/norm_math.h"
#include "core/source.h"
#include "cuda/backward_tile.h"

namespace fused_op::cuda {

// Takes the place of a pack of the rows beside x and dy, where no such rows are read.
struct NoPack {};

// Says which of the two reads rows beside x and dy. At most one of them does.
template <typename Source, typename Epilogue, bool kSource = Source::kReadsBeside,
          bool kEpilogue = Epilogue::kReadsBeside>
struct BesideOf {
  using Element = typename Source::GradSum;  // of the third stream, where there is one
  template <int N>
  using Packs = NoPack;
};
template <typename Source, typename Epilogue>
struct BesideOf<Source, Epilogue, true, false> {
  using Reader = Source;
  using Element = typename Source::BesideRow;
  template <int N>
  using Packs = Pack<Element, N>;
};
template <typename Source, typename Epilogue>
struct BesideOf<Source, Epilogue, false, true> {
  using Reader = Epilogue;
  using Element = typename Epilogue::BesideRow;
  template <int N>
  using Packs = Pack<Element, N>;
};

template <typename Norm_, typename Source_, typename Epilogue_, typename Access_>
struct BackwardOp {
  using Norm = Norm_;
  using Source = typename Source_::Backward;
  using Epilogue = typename Epilogue_::Backward;
  using Access = Access_;
  using A = Accumulator<typename Source_::Row>;
  using GradOutput = typename Epilogue_::Output;
  using X = std::conditional_t<Epilogue::kFromOutput, GradOutput, typename Source::Saved>;
  using Args = typename Epilogue::Args;

  static constexpr bool kReadsBeside = Source::kReadsBeside || Epilogue::kReadsBeside;
  static_assert(!(Source::kReadsSum && kReadsBeside), "one stream more than x and dy");
  using Beside = BesideOf<Source, Epilogue>;
  template <int N>
  using BesidePack = typename Beside::template Packs<N>;

  // The number of streams, the rows of the third one, and whether a call has it.
  static constexpr int kStreams = Source::kReadsSum || kReadsBeside ? 3 : 2;
  FUSED_OP_HD static const ConstRows& third(const Args& args) {
    if constexpr (kReadsBeside) {
      return Beside::Reader::beside(args);
    } else {
      return args.grad_sum;
    }
  }
  FUSED_OP_HD static bool third_arrives(const Args& args) {
    return kReadsBeside || Source::sum_arrives(args);
  }
};

// Which rows a CTA processes if rows have different parameters: those of one group, of which it is
// CTA number blockIdx.x / groups. A team begins at first_row_of(). Neighbouring rows of a group are
// rows_apart() rows apart.
template <typename Op>
__device__ __forceinline__ std::int64_t rows_apart(const typename Op::Args& args) {
  if constexpr (Op::Epilogue::kGrouped && !Op::Epilogue::kEntries) {
    return args.groups;
  } else {
    return 1;
  }
}
template <typename Op, typename Tile>
__device__ __forceinline__ std::int64_t first_row_of(const typename Op::Args& args,
                                                     const BackwardSteps& steps, int team) {
  if constexpr (Op::Epilogue::kGrouped) {
    const auto groups = static_cast<unsigned>(args.groups);
    const std::int64_t group = blockIdx.x % groups;
    const std::int64_t first = static_cast<std::int64_t>(blockIdx.x / groups) * blockDim.y + team;
    if constexpr (Op::Epilogue::kEntries) {
      return group * args.modulation.rows_each + first;
    }
    return first * groups + group;
  } else if (Tile::kTail && blockIdx.x >= steps.tail_cta) {
    return steps.tail_row + (blockIdx.x - steps.tail_cta) * blockDim.y + team;
  } else {
    return static_cast<std::int64_t>(blockIdx.x) * blockDim.y + team;
  }
}
template <typename Op, typename Tile>
__device__ __forceinline__ std::int64_t last_row_of(const typename Op::Args& args,
                                                    const BackwardSteps& steps) {  // past it
  if constexpr (Op::Epilogue::kEntries) {
    const std::int64_t entry = blockIdx.x % static_cast<unsigned>(args.groups);
    return (entry + 1) * args.modulation.rows_each;
  } else {
    return Tile::kTail && blockIdx.x < steps.tail_cta ? steps.tail_row : args.rows;
  }
}

// The elements of stream 0, 1 or 2 of an op: x, dy, and the third one.
template <typename Op, int kStream>
using StreamElement = std::conditional_t<
    kStream == 0, typename Op::X,
    std::conditional_t<kStream == 1, typename Op::GradOutput, typename Op::Beside::Element>>;

// Computes x̂ at N columns.
template <typename Op, int N, typename A, typename Parameters>
__device__ __forceinline__ void load_xhat(const typename Op::Epilogue& epilogue,
                                          const Parameters& parameters,
                                          const Pack<typename Op::X, N>& x,
                                          const typename Op::template BesidePack<N>& beside,
                                          const Normalizer<A>& normalizer, A (&xhat)[N]) {
  using Norm = typename Op::Norm;
  to_values(x, xhat);
  if constexpr (Op::Epilogue::kFromOutput) {
    epilogue.template recover<Norm>(parameters, xhat);
  } else {
    if constexpr (Op::Source::kReadsBeside) {
      Op::Source::combine(beside, xhat);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      xhat[j] = Norm::normalized(xhat[j], normalizer);
    }
  }
}

// Computes x̂ and its gradient at N columns from `col` on, and adds the terms of the parameters'
// gradients to `totals`. If it is the epilogue that reads `beside`, the gradient of `beside`
// replaces it.
template <typename Op, int N, typename A, typename Parameters, typename Col>
__device__ __forceinline__ void expand(const typename Op::Epilogue& epilogue,
                                       const Parameters& parameters, Col col,
                                       const Pack<typename Op::X, N>& x,
                                       const Pack<typename Op::GradOutput, N>& dy_pack,
                                       typename Op::template BesidePack<N>& beside,
                                       const Normalizer<A>& normalizer, A (&xhat)[N], A (&grad)[N],
                                       ParameterSums<N, A>& totals) {
  using Norm = typename Op::Norm;
  A dy[N];
  to_values(dy_pack, dy);
  load_xhat<Op>(epilogue, parameters, x, beside, normalizer, xhat);
  if constexpr (Op::Epilogue::kReadsBeside) {
    epilogue.template pullback<Norm>(parameters, col, xhat, dy, beside, grad, totals);
  } else {
    epilogue.template pullback<Norm>(parameters, col, xhat, dy, grad, totals);
  }
}

}  // namespace fused_op::cuda
