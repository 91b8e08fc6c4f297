// What a backward kernel computes, as types, and what all of them do with a pack: x and dy to x̂ and
// its gradient. Compiled by nvcc and by NVRTC; torch-free.
#pragma once

#include <type_traits>

#include "core/convert.h"
#include "core/epilogue.h"
#include "core/norm_args.h"
#include "core/norm_math.h"
#include "core/source.h"

namespace fused_op::cuda {

template <typename Norm_, typename Source_, typename Epilogue_, typename Access_>
struct BackwardOp {
  using Norm = Norm_;
  using Source = typename Source_::Backward;
  using Epilogue = typename Epilogue_::Backward;
  using Access = Access_;
  using A = Accumulator<typename Source_::Row>;
  using GradOutput = typename Epilogue_::Output;
  using X = std::conditional_t<Epilogue::kFromOutput, GradOutput, typename Source_::Row>;
};

// x̂ and its gradient at N columns from `col` on. Adds to `totals` what the gradients of the
// parameters gain.
template <typename Op, int N, typename A, typename Parameters, typename Col>
__device__ __forceinline__ void expand(const typename Op::Epilogue& epilogue,
                                       const Parameters& parameters, Col col,
                                       const Pack<typename Op::X, N>& x,
                                       const Pack<typename Op::GradOutput, N>& dy_pack,
                                       const Normalizer<A>& normalizer, A (&xhat)[N], A (&grad)[N],
                                       ParameterSums<N, A>& totals) {
  using Norm = typename Op::Norm;
  A dy[N];
  to_values(x, xhat);
  to_values(dy_pack, dy);
  if constexpr (Op::Epilogue::kFromOutput) {
    epilogue.template recover<Norm>(parameters, xhat);
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      xhat[j] = Norm::normalized(xhat[j], normalizer);
    }
  }
  epilogue.template pullback<Norm>(parameters, col, xhat, dy, grad, totals);
}

}  // namespace fused_op::cuda
