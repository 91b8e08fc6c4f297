// The op API: at::Tensor in, at::Tensor out. norm.cpp implements it, dispatcher.cpp registers it as
// torch.ops.fused_op, and fused_op.cpp binds it to Python. Nothing here knows autograd. Kernels
// read raw pointers, so tensors must be dense, on CPU or CUDA; routing.cpp makes sure that they
// are.
//
// Shapes: x is [..., normalized...]. The last `normalized_ndim` dimensions are normalised together:
// they hold `cols` elements, and the leading dimensions are `rows`. A result that was not asked for
// is an undefined tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>

#include "core/norm_args.h"

namespace fused_op {

using OptionalTensor = std::optional<at::Tensor>;
using OptionalDtype = std::optional<at::ScalarType>;
using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using FourTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

struct NormTensors {
  at::Tensor input;          // f16, bf16, f32 or f64
  OptionalTensor residual;   // like input, or f32 beside f16 and bf16
  OptionalTensor weight;     // [normalized...], f16, bf16, f32 or f64
  OptionalTensor bias;       // [normalized...], likewise; the RMS norm has none
  OptionalTensor rng_state;  // [2] i64, seed and offset of the dropout mask, on the CPU or the
                             // input's device; read if dropout_p > 0
};

struct NormOptions {
  NormKind norm = NormKind::kLayerNorm;
  std::int64_t normalized_ndim = 0;  // 0: the default, see normalized_ndim() in checks.h
  double eps = 1e-5;
  bool zero_centered = false;  // multiply by 1 + weight; no effect without a weight
  Rounding rounding = Rounding::kOnce;
  double dropout_p = 0;        // of the input if there is a residual, else of the output
  OptionalDtype output_dtype;  // default: of input
  OptionalDtype sum_dtype;     // default: of residual
  bool save_stats = false;
};

// output = norm(input) * weight + bias, or, with a residual, output = norm(sum) * weight + bias
// where sum = input + residual. Returns
//   output  like input, contiguous, in output_dtype
//   sum     contiguous, in sum_dtype; undefined without a residual
//   stats   [2, rows] mean and rstd (RMS norm: [1, rows] rstd), f32 (f64 for f64); undefined unless
//           save_stats
ThreeTensors norm_forward(const NormTensors& tensors, const NormOptions& options);

struct BackwardTensors {
  at::Tensor grad_output;    // like x, in the dtype of the output
  OptionalTensor grad_sum;   // like x: what arrives through the sum; absent: nothing
  at::Tensor x;              // what forward normalised: its input, or its sum
  OptionalTensor weight;     // as in forward
  OptionalTensor bias;       // as in forward; read if x_is_output
  at::Tensor stats;          // as forward returned it
  OptionalTensor rng_state;  // as in forward
};

struct BackwardOptions {
  NormKind norm = NormKind::kLayerNorm;
  std::int64_t normalized_ndim = 1;  // at least 1
  bool zero_centered = false;
  Rounding rounding = Rounding::kOnce;
  double dropout_p = 0;
  bool x_is_output = false;  // x holds the output instead, from which x̂ is recovered
  at::ScalarType input_dtype = at::kFloat;
  OptionalDtype residual_dtype;             // absent without a residual
  at::ScalarType param_dtype = at::kFloat;  // of the gradients of weight and bias
  std::array<bool, 4> wanted = {};          // grad_input, grad_residual, grad_weight, grad_bias
};

// Where parameter gradients are added instead of being returned: [normalized...], f32.
struct MainGrads {
  OptionalTensor weight;
  OptionalTensor bias;

  bool any() const { return weight || bias; }
};

// The gradients of norm_forward. Returns, each undefined unless wanted,
//   grad_input     like x, in input_dtype
//   grad_residual  like x, in residual_dtype; undefined also where it is grad_input:
//                  shares_gradient() in checks.h
//   grad_weight    [normalized...] in param_dtype; undefined also where it was added to main_grads
//   grad_bias      [normalized...] in param_dtype; likewise
FourTensors norm_backward(const BackwardTensors& tensors, const BackwardOptions& options,
                          const MainGrads& main_grads = {});

// Seed and offset of a dropout mask, for rng_state, as backend::dropout_state() draws them. `like`
// is an empty tensor, of which only the device matters. Through it the dispatcher knows the
// backend, and vmap knows whether there is one state or one for each sample.
at::Tensor dropout_state(const at::Tensor& like, bool on_device);

}  // namespace fused_op
