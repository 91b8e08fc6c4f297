// The op layer: check, allocate, fill the arguments, run on the backend. Both ops read in that
// order. Torch tensors end here, and nothing here knows CUDA or Python.
#include "backend.h"
#include "checks.h"
#include "core/norm_args.h"
#include "fused_op.h"
#include "kernel_arguments.h"

namespace fused_op {
namespace {

struct Outputs {
  at::Tensor output;
  at::Tensor sum;
  at::Tensor stats;
  at::ScalarType dtype;  // of what is normalised
};

Outputs allocate_outputs(const NormTensors& tensors, const NormOptions& options,
                         const Shape& shape) {
  const at::Tensor& input = tensors.input;
  const at::Device device = input.device();
  Outputs outputs;
  outputs.dtype = input.scalar_type();
  outputs.output =
      backend::empty(input.sizes(), options.output_dtype.value_or(outputs.dtype), device);
  if (tensors.residual) {
    outputs.dtype = options.sum_dtype.value_or(tensors.residual->scalar_type());
    outputs.sum = backend::empty(input.sizes(), outputs.dtype, device);
  }
  if (options.save_stats) {
    outputs.stats =
        backend::empty({stats_rows(options.norm), shape.rows}, stats_dtype(outputs.dtype), device);
  }
  return outputs;
}

void run_forward(const NormTensors& tensors, const NormOptions& options, const Shape& shape,
                 const Outputs& outputs) {
  ForwardInputs inputs(tensors, options, shape, outputs.dtype);
  NormForwardArgs& args = inputs.args;
  args.output = {pointer(outputs.output), to_dtype(outputs.output.scalar_type())};
  args.sum = pointer(outputs.sum);
  args.stats = pointer(outputs.stats);
  backend::norm_forward(args, tensors.input.device());
}

struct Gradients {
  at::Tensor input;
  at::Tensor residual;
  at::Tensor weight;  // or the main_grad that it is added to
  at::Tensor bias;
  at::ScalarType kernel_dtype;  // of the parameter gradients; rounded to param_dtype at the end
};

Gradients allocate_gradients(const BackwardTensors& tensors, const BackwardOptions& options,
                             const Shape& shape, const MainGrads& main_grads) {
  const auto [wants_input, wants_residual, wants_weight, wants_bias] = options.wanted;
  const at::IntArrayRef sizes = tensors.x.sizes();
  const at::Device device = tensors.x.device();
  const bool one_gradient = shares_gradient(options);
  Gradients gradients;
  gradients.kernel_dtype = kernel_param_dtype(options.input_dtype, options.param_dtype,
                                              tensors.weight, tensors.bias, options.zero_centered);
  if (wants_input || (one_gradient && wants_residual)) {
    gradients.input = backend::empty(sizes, options.input_dtype, device);
  }
  if (wants_residual && !one_gradient) {
    gradients.residual = backend::empty(sizes, *options.residual_dtype, device);
  }
  if (main_grads.any()) {
    gradients.weight = main_grads.weight.value_or(at::Tensor());
    gradients.bias = main_grads.bias.value_or(at::Tensor());
    return gradients;
  }
  if (wants_weight) {
    gradients.weight = backend::empty(shape.normalized, gradients.kernel_dtype, device);
  }
  if (wants_bias) {
    gradients.bias = backend::empty(shape.normalized, gradients.kernel_dtype, device);
  }
  return gradients;
}

// For rows at two strides, the kernels write gradients of the same dtype, without a residual.
RowAccess access_of(const at::Tensor& x_or_output, const BackwardTensors& tensors,
                    const BackwardOptions& options, const Shape& shape) {
  const bool may_be_split = !options.residual_dtype &&
                            (options.x_is_output || tensors.x.scalar_type() == options.input_dtype);
  return may_be_split ? access_of({&x_or_output, &tensors.grad_output}, shape) : RowAccess{};
}

// Fills everything except the tensors that are read.
NormBackwardArgs make_backward_args(const BackwardOptions& options, const Shape& shape,
                                    const Gradients& gradients, bool add_grads) {
  NormBackwardArgs args;
  args.kind = options.norm;
  args.param_dtype = to_dtype(gradients.kernel_dtype);
  args.rounding = options.rounding;
  args.rows = shape.rows;
  args.cols = shape.cols;
  args.has_residual = options.residual_dtype.has_value();
  args.grad_input = {pointer(gradients.input), to_dtype(options.input_dtype)};
  args.grad_residual = {pointer(gradients.residual),
                        to_dtype(options.residual_dtype.value_or(options.input_dtype))};
  args.grad_weight = pointer(gradients.weight);
  args.grad_bias = pointer(gradients.bias);
  args.add_grads = add_grads;
  args.x_is_output = options.x_is_output;
  args.drops_input = options.dropout_p > 0 && args.has_residual;
  return args;
}

void run_backward(const BackwardTensors& tensors, const BackwardOptions& options,
                  const Shape& shape, const Gradients& gradients, bool add_grads) {
  // x̂ is recovered from the output, whose dtype a hook on saved tensors may have changed.
  const at::Tensor row_source =
      options.x_is_output ? tensors.x.to(tensors.grad_output.scalar_type()) : tensors.x;
  const RowAccess access = access_of(row_source, tensors, options, shape);
  const Borrowed x = readable_rows(row_source, shape, access);
  const Borrowed grad_output = readable_rows(tensors.grad_output, shape, access);
  const Borrowed grad_sum =
      tensors.grad_sum ? readable_rows(*tensors.grad_sum, shape, access) : Borrowed();
  const Parameters parameters(tensors.weight, options.x_is_output ? tensors.bias : OptionalTensor(),
                              options.zero_centered, gradients.kernel_dtype);
  const Borrowed stats = readable_dense(tensors.stats, tensors.stats.element_size());

  NormBackwardArgs args = make_backward_args(options, shape, gradients, add_grads);
  args.dtype = to_dtype(row_source.scalar_type());
  args.x = const_rows(*x, shape);
  args.grad_output = const_rows(*grad_output, shape);
  if (tensors.grad_sum) {
    args.grad_sum = const_rows(*grad_sum, shape);
  }
  args.weight = const_pointer(*parameters.weight);
  args.bias = const_pointer(*parameters.bias);
  args.stats = stats->const_data_ptr();
  args.dropout = to_dropout(options.dropout_p, tensors.rng_state);

  backend::norm_backward(args, tensors.x.device());
}

at::Tensor rounded(const at::Tensor& gradient, at::ScalarType dtype) {
  return !gradient.defined() || gradient.scalar_type() == dtype ? gradient : gradient.to(dtype);
}

}  // namespace

ThreeTensors norm_forward(const NormTensors& tensors, const NormOptions& options) {
  const char* const op = op_name(options.norm, tensors.residual.has_value());
  check_kinds(op, tensors, options);
  const Shape shape = checked_shape(op, tensors.input, normalized_ndim(tensors, options));
  check_call(op, tensors, options, shape);
  const Outputs outputs = allocate_outputs(tensors, options, shape);
  const auto& [output, sum, stats, dtype] = outputs;
  if (shape.empty()) {
    if (options.save_stats) {
      stats.zero_();
    }
    return {output, sum, stats};
  }
  check_memory(op, tensors);
  run_forward(tensors, options, shape, outputs);
  // As in PyTorch: its RMS norm keeps a channels-last format, its layer norm does not.
  const bool keeps_format = options.norm == NormKind::kRmsNorm && !tensors.residual;
  return {keeps_format ? output.contiguous(tensors.input.suggest_memory_format()) : output, sum,
          stats};
}

FourTensors norm_backward(const BackwardTensors& tensors, const BackwardOptions& options,
                          const MainGrads& main_grads) {
  const char* const op = "fused_op::norm_backward";
  check_call(op, tensors, options);
  const auto [wants_input, wants_residual, wants_weight, wants_bias] = options.wanted;
  if (main_grads.any()) {
    check_main_grads(op, main_grads, wants_weight, wants_bias, tensors.x, options.normalized_ndim);
  }
  const Shape shape(tensors.x, options.normalized_ndim);
  const Gradients gradients = allocate_gradients(tensors, options, shape, main_grads);
  if (shape.empty()) {
    for (const at::Tensor* const gradient : {&gradients.weight, &gradients.bias}) {
      if (gradient->defined() && !main_grads.any()) {
        gradient->zero_();
      }
    }
  } else if (options.wanted != decltype(options.wanted){}) {  // else there is nothing to launch
    check_memory(op, tensors, main_grads);
    run_backward(tensors, options, shape, gradients, main_grads.any());
  }
  if (main_grads.any()) {
    return {gradients.input, gradients.residual, at::Tensor(), at::Tensor()};
  }
  return {gradients.input, gradients.residual, rounded(gradients.weight, options.param_dtype),
          rounded(gradients.bias, options.param_dtype)};
}

at::Tensor dropout_state(const at::Tensor& like, bool on_device) {
  return backend::dropout_state(like.device(), on_device);
}

}  // namespace fused_op
