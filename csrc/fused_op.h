// The op API: at::Tensor in, at::Tensor out. norm.cpp implements it, fused_op.cpp registers it with
// the dispatcher and binds it to Python. Raw means: no autograd, and a kernel reads the pointers,
// so that the tensors must be dense ones of CPU or CUDA (routing.h sees to that).
//
// Shapes: x is [..., normalized...], where `normalized_ndim` counts the trailing dimensions that
// are normalised together (0: weight's, else bias's, else 1). They are `cols` elements, the leading
// dimensions `rows`. A result that was not asked for is an undefined tensor (None in Python);
// through the dispatcher, whose results must be real tensors, it is one without elements.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

namespace fused_op {

using OptionalTensor = std::optional<at::Tensor>;
using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// output = norm(input [+ residual]) * weight + bias, with 1 + weight in the place of weight if
// zero_centered. Returns
//   output  like input, contiguous
//   sum     input + residual, contiguous; undefined without a residual
//   stats   [2, rows] mean and rstd ("rms_norm": [1, rows] rstd), f32 (f64 for f64);
//           undefined unless save_stats
ThreeTensors norm_forward(
    std::string_view norm,           // "layer_norm" or "rms_norm"
    const at::Tensor& input,         // f16, bf16, f32 or f64
    const OptionalTensor& residual,  // like input
    const OptionalTensor& weight,    // [normalized...], dtype of input, or f32 for f16 and bf16
    const OptionalTensor& bias,      // like weight; "rms_norm" has none
    std::int64_t normalized_ndim, double eps,
    bool zero_centered,  // without effect where weight is absent: its place is taken by 1
    bool save_stats);

// The gradients of norm_forward. Returns, each undefined unless `wanted`,
//   grad_input   like x; it is the gradient of the residual too
//   grad_weight  [normalized...] in param_dtype
//   grad_bias    [normalized...] in param_dtype
ThreeTensors norm_backward(
    std::string_view norm,
    const at::Tensor& grad_output,   // like x
    const OptionalTensor& grad_sum,  // like x: what arrives through the sum; absent: nothing
    const at::Tensor& x,             // what forward normalised: its input, or its sum
    const OptionalTensor& weight,    // as in forward
    const at::Tensor& stats,         // as forward returned it
    std::int64_t normalized_ndim,    // at least 1
    bool zero_centered,              // as in forward
    at::ScalarType param_dtype,      // of weight and bias
    std::array<bool, 3> wanted);     // grad_input, grad_weight, grad_bias

}  // namespace fused_op
