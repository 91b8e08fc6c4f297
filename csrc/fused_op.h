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
using OptionalDtype = std::optional<at::ScalarType>;
using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using FourTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// output = norm(input) * weight + bias, or, with a residual, output = norm(sum) * weight + bias
// where sum = input + residual; 1 + weight in the place of weight if zero_centered. Dropout is of
// the input if there is a residual, else of the output. Returns
//   output  like input, contiguous, in output_dtype
//   sum     contiguous, in sum_dtype; undefined without a residual
//   stats   [2, rows] mean and rstd ("rms_norm": [1, rows] rstd), f32 (f64 for f64);
//           undefined unless save_stats
ThreeTensors norm_forward(
    std::string_view norm,            // "layer_norm" or "rms_norm"
    const at::Tensor& input,          // f16, bf16, f32 or f64
    const OptionalTensor& residual,   // dtype of input, or f32 for f16 and bf16
    const OptionalTensor& weight,     // [normalized...], f16, bf16, f32 or f64
    const OptionalTensor& bias,       // [normalized...], likewise; "rms_norm" has none
    const OptionalTensor& rng_state,  // [2] i64, seed and offset of the dropout mask, on the CPU or
                                      // the input's device; read if dropout_p > 0
    std::int64_t normalized_ndim, double eps,
    bool zero_centered,  // without effect where weight is absent: its place is taken by 1
    double dropout_p,
    OptionalDtype output_dtype,  // default: of input
    OptionalDtype sum_dtype,     // default: of residual
    bool save_stats);

// The gradients of norm_forward. Returns, each undefined unless `wanted`,
//   grad_input     like x, in input_dtype
//   grad_residual  like x, in residual_dtype; undefined also where it is grad_input:
//                  shares_gradient() in checks.h
//   grad_weight    [normalized...] in param_dtype
//   grad_bias      [normalized...] in param_dtype
FourTensors norm_backward(
    std::string_view norm,
    const at::Tensor& grad_output,    // like x, in the dtype of the output
    const OptionalTensor& grad_sum,   // like x: what arrives through the sum; absent: nothing
    const at::Tensor& x,              // what forward normalised: its input, or its sum
    const OptionalTensor& weight,     // as in forward
    const OptionalTensor& bias,       // as in forward; read if x_is_output
    const at::Tensor& stats,          // as forward returned it
    const OptionalTensor& rng_state,  // as in forward
    std::int64_t normalized_ndim,     // at least 1
    bool zero_centered,               // as in forward
    double dropout_p,                 // as in forward
    bool x_is_output,                 // x holds the output instead, of which x̂ is computed again
    at::ScalarType input_dtype,
    OptionalDtype residual_dtype,  // absent without a residual
    at::ScalarType param_dtype,    // of the gradients of weight and bias
    std::array<bool, 4> wanted);   // grad_input, grad_residual, grad_weight, grad_bias

// The same, but the parameters' gradients are added to f32 tensors and not returned.
FourTensors norm_backward_into(std::string_view norm, const at::Tensor& grad_output,
                               const OptionalTensor& grad_sum, const at::Tensor& x,
                               const OptionalTensor& weight, const OptionalTensor& bias,
                               const at::Tensor& stats, const OptionalTensor& rng_state,
                               std::int64_t normalized_ndim, bool zero_centered, double dropout_p,
                               bool x_is_output, at::ScalarType input_dtype,
                               OptionalDtype residual_dtype, at::ScalarType param_dtype,
                               std::array<bool, 4> wanted, const OptionalTensor& weight_main_grad,
                               const OptionalTensor& bias_main_grad);

// Refuses what norm_backward_into refuses of them, where it is not called.
void check_main_grads(const at::Tensor& x, std::int64_t normalized_ndim,
                      const OptionalTensor& weight_main_grad, const OptionalTensor& bias_main_grad);

// Seed and offset of a dropout mask, for rng_state, as backend::dropout_state() draws them. `like`
// is an empty tensor, of which only the device matters here: through it the dispatcher knows the
// backend, and vmap whether there is one state or one for each sample.
at::Tensor dropout_state(const at::Tensor& like, bool on_device);

}  // namespace fused_op
