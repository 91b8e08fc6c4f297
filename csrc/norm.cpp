// The op layer: check, allocate, fill the arguments, run on the backend. Both ops read like that
// from top to bottom. Torch tensors end here; CUDA and Python are not known here.
#include <cstdint>

#include "backend.h"
#include "checks.h"
#include "core/norm_args.h"
#include "fused_op.h"
#include "kernel_arguments.h"

namespace fused_op {
namespace {

NormKind parse_norm(std::string_view norm) {
  TORCH_CHECK_VALUE(norm == "layer_norm" || norm == "rms_norm",
                    "fused_op: norm must be 'layer_norm' or 'rms_norm', got '", norm, "'");
  return norm == "layer_norm" ? NormKind::kLayerNorm : NormKind::kRmsNorm;
}

}  // namespace

ThreeTensors norm_forward(std::string_view norm, const at::Tensor& input,
                          const OptionalTensor& residual, const OptionalTensor& weight,
                          const OptionalTensor& bias, const OptionalTensor& rng_state,
                          std::int64_t normalized_ndim, double eps, bool zero_centered,
                          double dropout_p, OptionalDtype output_dtype, OptionalDtype sum_dtype,
                          bool save_stats) {
  const NormKind kind = parse_norm(norm);
  const char* const op = op_name(norm, residual.has_value());
  check_eps(op, eps);
  check_kinds(op, input, residual, weight, bias, output_dtype, sum_dtype);
  check_bias_allowed(op, kind == NormKind::kLayerNorm, bias.has_value());
  if (normalized_ndim == 0) {
    normalized_ndim = weight ? weight->dim() : bias ? bias->dim() : 1;
  }
  check_normalized_ndim(op, normalized_ndim, input);
  const Shape shape(input, normalized_ndim);
  if (residual) {
    check_same_shape(op, "residual", *residual, input);
  }
  if (weight) {
    check_param_shape(op, "weight", *weight, shape.normalized, input);
  }
  if (bias) {
    check_param_shape(op, "bias", *bias, shape.normalized, input);
  }
  check_dropout(op, dropout_p, rng_state, input);

  const at::Device device = input.device();
  const at::Tensor output =
      backend::empty(input.sizes(), output_dtype.value_or(input.scalar_type()), device);
  at::Tensor sum;
  at::ScalarType dtype = input.scalar_type();  // of what is normalised
  if (residual) {
    dtype = sum_dtype.value_or(residual->scalar_type());
    sum = backend::empty(input.sizes(), dtype, device);
  }
  at::Tensor stats;
  if (save_stats) {
    stats = backend::empty({stats_rows(kind), shape.rows}, stats_dtype(dtype), device);
  }
  if (shape.empty()) {
    if (save_stats) {
      stats.zero_();
    }
    return {output, sum, stats};
  }

  check_memory(op, "input", input);
  check_memory(op, "residual", residual);
  check_memory(op, "weight", weight);
  check_memory(op, "bias", bias);
  check_memory(op, "rng_state", rng_state);

  // Copies among these live until the kernel has been queued.
  const Borrowed input_rows = readable_rows(input, shape, false, !residual);
  const Borrowed residual_rows =
      residual ? readable_rows(*residual, shape, false, !residual) : Borrowed();
  const at::ScalarType given_dtype = weight ? weight->scalar_type()
                                     : bias ? bias->scalar_type()
                                            : dtype;
  const at::ScalarType param_dtype =
      kernel_param_dtype(input.scalar_type(), given_dtype, weight, bias, zero_centered);
  const Parameters parameters(weight, bias, zero_centered, param_dtype);

  NormForwardArgs args;
  args.kind = kind;
  args.dtype = to_dtype(dtype);
  args.param_dtype = to_dtype(param_dtype);
  args.rows = shape.rows;
  args.cols = shape.cols;
  args.input = const_rows(*input_rows, shape);
  if (residual) {
    args.residual = const_rows(*residual_rows, shape);
  }
  args.weight = const_pointer(parameters.weight);
  args.bias = const_pointer(parameters.bias);
  args.output = dense_rows(output);
  args.sum = pointer(sum);
  args.stats = pointer(stats);
  args.eps = eps;
  args.dropout = to_dropout(dropout_p, rng_state);
  backend::norm_forward(args, device);
  // As in PyTorch, whose RMS norm keeps a channels-last format and whose layer norm does not.
  const bool keeps_format = kind == NormKind::kRmsNorm && !residual;
  return {keeps_format ? output.contiguous(input.suggest_memory_format()) : output, sum, stats};
}

FourTensors norm_backward(std::string_view norm, const at::Tensor& grad_output,
                          const OptionalTensor& grad_sum, const at::Tensor& x,
                          const OptionalTensor& weight, const OptionalTensor& bias,
                          const at::Tensor& stats, const OptionalTensor& rng_state,
                          std::int64_t normalized_ndim, bool zero_centered, double dropout_p,
                          bool x_is_output, at::ScalarType input_dtype,
                          OptionalDtype residual_dtype, at::ScalarType param_dtype,
                          std::array<bool, 4> wanted) {
  return norm_backward_into(norm, grad_output, grad_sum, x, weight, bias, stats, rng_state,
                            normalized_ndim, zero_centered, dropout_p, x_is_output, input_dtype,
                            residual_dtype, param_dtype, wanted, std::nullopt, std::nullopt);
}

FourTensors norm_backward_into(std::string_view norm, const at::Tensor& grad_output,
                               const OptionalTensor& grad_sum, const at::Tensor& x,
                               const OptionalTensor& weight, const OptionalTensor& bias,
                               const at::Tensor& stats, const OptionalTensor& rng_state,
                               std::int64_t normalized_ndim, bool zero_centered, double dropout_p,
                               bool x_is_output, at::ScalarType input_dtype,
                               OptionalDtype residual_dtype, at::ScalarType param_dtype,
                               std::array<bool, 4> wanted, const OptionalTensor& weight_main_grad,
                               const OptionalTensor& bias_main_grad) {
  const NormKind kind = parse_norm(norm);
  const char* const op = "fused_op::norm_backward";
  check_input_kind(op, "x", x);
  check_input_kind(op, "grad_output", grad_output);
  check_device(op, "grad_output", grad_output, x);
  check_bias_allowed(op, kind == NormKind::kLayerNorm, wanted[3] || bias.has_value());
  check_normalized_ndim(op, normalized_ndim, x);
  const Shape shape(x, normalized_ndim);
  check_same_shape(op, "grad_output", grad_output, x);
  if (grad_sum) {
    check_like_input_kind(op, "grad_sum", *grad_sum, x);
    check_same_shape(op, "grad_sum", *grad_sum, x);
  }
  check_backward_dtypes(op, x.scalar_type(), grad_output.scalar_type(), input_dtype, residual_dtype,
                        param_dtype);
  if (weight) {
    check_param(op, "weight", *weight, shape.normalized, x);
  }
  if (bias) {
    check_param(op, "bias", *bias, shape.normalized, x);
  }
  check_dropout(op, dropout_p, rng_state, x);
  TORCH_CHECK(!x_is_output || (dropout_p == 0 && !residual_dtype), op,
              ": the output stands for x only without dropout and without a residual");
  TORCH_CHECK(!grad_sum || residual_dtype, op, ": there is no sum without a residual");
  const at::ScalarType compute = stats_dtype(x.scalar_type());
  const at::Device device = x.device();
  check_stats(op, stats, {stats_rows(kind), shape.rows}, compute, device);

  // Gradients are rounded to the dtype that is asked for at the end.
  const at::ScalarType kernel_dtype =
      kernel_param_dtype(input_dtype, param_dtype, weight, bias, zero_centered);
  const bool one_gradient = shares_gradient(dropout_p, input_dtype, residual_dtype);
  at::Tensor grad_input, grad_residual, grad_weight, grad_bias;
  if (wanted[0] || (one_gradient && wanted[1])) {
    grad_input = backend::empty(x.sizes(), input_dtype, device);
  }
  if (wanted[1] && !one_gradient) {
    grad_residual = backend::empty(x.sizes(), *residual_dtype, device);
  }
  const bool add_grads = weight_main_grad || bias_main_grad;
  if (add_grads) {
    check_main_grads(op, {wanted[2], wanted[3]}, weight_main_grad, bias_main_grad, shape.normalized,
                     compute, device);
    grad_weight = weight_main_grad.value_or(at::Tensor());
    grad_bias = bias_main_grad.value_or(at::Tensor());
  } else {
    if (wanted[2]) {
      grad_weight = backend::empty(shape.normalized, kernel_dtype, device);
    }
    if (wanted[3]) {
      grad_bias = backend::empty(shape.normalized, kernel_dtype, device);
    }
  }
  const auto results = [&]() -> FourTensors {
    const auto rounded = [&](const at::Tensor& gradient) {
      const bool is_rounded = !gradient.defined() || gradient.scalar_type() == param_dtype;
      return add_grads ? at::Tensor() : is_rounded ? gradient : gradient.to(param_dtype);
    };
    return {grad_input, grad_residual, rounded(grad_weight), rounded(grad_bias)};
  };
  if (shape.empty()) {
    for (at::Tensor* const gradient : {&grad_weight, &grad_bias}) {
      if (gradient->defined() && !add_grads) {
        gradient->zero_();
      }
    }
    return results();
  }
  if (wanted == std::array<bool, 4>{}) {
    return results();  // nothing to launch
  }

  check_memory(op, "grad_output", grad_output);
  check_memory(op, "grad_sum", grad_sum);
  check_memory(op, "x", x);
  check_memory(op, "weight", weight);
  check_memory(op, "bias", bias);
  check_memory(op, "stats", stats);
  check_memory(op, "rng_state", rng_state);
  check_memory(op, "main_grad of weight", weight_main_grad);
  check_memory(op, "main_grad of bias", bias_main_grad);

  // Rows at two strides have kernels for gradients of their own dtype, without a residual.
  const bool may_be_split = !residual_dtype && (x_is_output || x.scalar_type() == input_dtype);
  const auto is_split = [&](const at::Tensor& tensor) {
    if (!may_be_split || !tensor.is_cuda() || !is_short(tensor, shape)) {
      return false;
    }
    const std::optional<RowLayout> layout = row_layout(tensor, shape);
    return layout && layout->inner != 0;
  };
  // A hook on saved tensors may have changed the dtype of the output, from which x̂ is recovered.
  const at::Tensor row_source = x_is_output ? x.to(grad_output.scalar_type()) : x;
  // One at two strides, and all are read in vectors.
  const bool in_vectors = is_split(row_source) || is_split(grad_output);
  const Borrowed x_rows = readable_rows(row_source, shape, in_vectors, may_be_split);
  const Borrowed grad_output_rows = readable_rows(grad_output, shape, in_vectors, may_be_split);
  const Borrowed grad_sum_rows =
      grad_sum ? readable_rows(*grad_sum, shape, in_vectors, may_be_split) : Borrowed();
  const Parameters parameters(weight, x_is_output ? bias : OptionalTensor(), zero_centered,
                              kernel_dtype);
  const Borrowed dense_stats = readable_dense(stats, stats.element_size());

  NormBackwardArgs args;
  args.kind = kind;
  args.dtype = to_dtype(row_source.scalar_type());
  args.param_dtype = to_dtype(kernel_dtype);
  args.rows = shape.rows;
  args.cols = shape.cols;
  args.x = const_rows(*x_rows, shape);
  args.grad_output = const_rows(*grad_output_rows, shape);
  if (grad_sum) {
    args.grad_sum = const_rows(*grad_sum_rows, shape);
  }
  args.weight = const_pointer(parameters.weight);
  args.bias = const_pointer(parameters.bias);
  args.stats = dense_stats->const_data_ptr();
  args.has_residual = residual_dtype.has_value();
  args.grad_input = {pointer(grad_input), to_dtype(input_dtype)};
  args.grad_residual = {pointer(grad_residual), to_dtype(residual_dtype.value_or(input_dtype))};
  args.grad_weight = pointer(grad_weight);
  args.grad_bias = pointer(grad_bias);
  args.add_grads = add_grads;
  args.x_is_output = x_is_output;
  args.dropout = to_dropout(dropout_p, rng_state);
  args.drops_input = dropout_p > 0 && residual_dtype.has_value();
  const auto bytes = static_cast<std::int64_t>(backend::norm_backward_workspace(args, device));
  const at::Tensor workspace =
      bytes > 0 ? backend::empty({bytes}, at::kByte, device) : at::Tensor();
  args.workspace = pointer(workspace);
  backend::norm_backward(args, device);
  return results();
}

void check_main_grads(const at::Tensor& x, std::int64_t normalized_ndim,
                      const OptionalTensor& weight_main_grad,
                      const OptionalTensor& bias_main_grad) {
  const char* const op = "fused_op::norm_backward";
  check_normalized_ndim(op, normalized_ndim, x);
  check_main_grads(op, {weight_main_grad.has_value(), bias_main_grad.has_value()}, weight_main_grad,
                   bias_main_grad, x.sizes().slice(x.dim() - normalized_ndim),
                   stats_dtype(x.scalar_type()), x.device());
}

at::Tensor dropout_state(const at::Tensor& like, bool on_device) {
  return backend::dropout_state(like.device(), on_device);
}

}  // namespace fused_op
