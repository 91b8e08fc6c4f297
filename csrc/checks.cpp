#include "checks.h"

#include <c10/util/Exception.h>

#include <cmath>

namespace fused_op {
namespace {

bool is_supported(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 ||
         dtype == at::kDouble;
}

// The output may be wider than a 16-bit input or narrower than an f32 one.
bool is_supported_output(at::ScalarType input, at::ScalarType output) {
  return is_supported_pair(input, output) ||
         (input == at::kFloat && is_supported(output) && c10::elementSize(output) == 2);
}

void check_param_dtype(const char* op, const char* name, at::ScalarType dtype) {
  TORCH_CHECK(is_supported(dtype), op,
              ": mixed dtype: expect parameter to have scalar type of Float, Half, BFloat16 or "
              "Double, got ",
              name, " of ", dtype);
}

void check_bias_allowed(const char* op, NormKind norm, bool has_bias) {
  TORCH_CHECK(norm == NormKind::kLayerNorm || !has_bias, op,
              ": rms_norm has no bias, so it must be None");
}

void check_dropout(const char* op, double p, const OptionalTensor& rng_state,
                   const at::Tensor& input) {
  TORCH_CHECK_VALUE(p >= 0 && p <= 1, op,
                    ": dropout probability has to be between 0 and 1, but got ", p);
  TORCH_CHECK(
      p == 0 || (rng_state && rng_state->scalar_type() == at::kLong && rng_state->dim() == 1 &&
                 rng_state->numel() == 2 && rng_state->is_contiguous() &&
                 (rng_state->is_cpu() || rng_state->device() == input.device())),
      op, ": dropout needs an rng_state: seed and offset, Long of shape [2] on the CPU or ",
      input.device());
}

// Backward may see neither the input nor the parameters. Their dtypes are therefore options.
void check_backward_dtypes(const char* op, const BackwardTensors& tensors,
                           const BackwardOptions& options) {
  const at::ScalarType x = tensors.x.scalar_type(), input = options.input_dtype;
  const at::ScalarType grad_output = tensors.grad_output.scalar_type();
  const bool one_precision = (x == at::kDouble) == (grad_output == at::kDouble);
  TORCH_CHECK(one_precision, op, ": grad_output of ", grad_output, " does not fit x of ", x);
  TORCH_CHECK(is_supported(input) && (x == at::kDouble) == (input == at::kDouble), op,
              ": input_dtype of ", input, " does not fit x of ", x);
  const OptionalDtype residual = options.residual_dtype;
  TORCH_CHECK(!residual || is_supported_pair(input, *residual), op,
              ": residual_dtype must be input_dtype, or fit it, got ", residual.value_or(input));
  check_param_dtype(op, "param_dtype", options.param_dtype);
}

}  // namespace

void check_residual_kind(const char* op, const at::Tensor& residual, const at::Tensor& input,
                         OptionalDtype sum_dtype) {
  const auto or_float = [](at::ScalarType dtype) {
    return c10::elementSize(dtype) == 2 ? ", or Float" : "";
  };
  check_rows(op, "residual", residual);
  TORCH_CHECK(is_supported_pair(input.scalar_type(), residual.scalar_type()), op,
              ": residual must have the dtype of input, ", input.scalar_type(),
              or_float(input.scalar_type()), ", got ", residual.scalar_type());
  TORCH_CHECK(!sum_dtype || is_supported_pair(residual.scalar_type(), *sum_dtype), op,
              ": residual_dtype must be the dtype of residual, ", residual.scalar_type(),
              or_float(residual.scalar_type()), ", got ", *sum_dtype);
  check_device(op, "residual", residual, input);
}

NormKind parse_norm(std::string_view norm) {
  TORCH_CHECK_VALUE(norm == "layer_norm" || norm == "rms_norm",
                    "fused_op: norm must be 'layer_norm' or 'rms_norm', got '", norm, "'");
  return norm == "layer_norm" ? NormKind::kLayerNorm : NormKind::kRmsNorm;
}

std::string_view name_of(NormKind norm) {
  return norm == NormKind::kLayerNorm ? "layer_norm" : "rms_norm";
}

Rounding parse_rounding(std::string_view rounding) {
  TORCH_CHECK_VALUE(rounding == "once" || rounding == "before_weight",
                    "fused_op: rounding must be 'once' or 'before_weight', got '", rounding, "'");
  return rounding == "once" ? Rounding::kOnce : Rounding::kBeforeWeight;
}

std::string_view name_of(Rounding rounding) {
  return rounding == Rounding::kOnce ? "once" : "before_weight";
}

bool parse_silu(std::optional<std::string_view> activation) {
  TORCH_CHECK_VALUE(!activation || *activation == "silu",
                    "fused_op: activation must be 'silu' or None, got '", activation.value_or(""),
                    "'");
  return activation.has_value();
}

const char* op_name(NormKind norm, bool adds_residual) {
  if (norm == NormKind::kRmsNorm) {
    return adds_residual ? "fused_add_rms_norm" : "fused_rms_norm";
  }
  return adds_residual ? "fused_add_layer_norm" : "fused_layer_norm";
}

std::int64_t normalized_ndim(const NormTensors& tensors, const NormOptions& options) {
  if (options.normalized_ndim != 0) {
    return options.normalized_ndim;
  }
  return tensors.weight ? tensors.weight->dim() : tensors.bias ? tensors.bias->dim() : 1;
}

bool is_supported_pair(at::ScalarType input, at::ScalarType other) {
  return is_supported(input) &&
         (other == input || (other == at::kFloat && c10::elementSize(input) == 2));
}

bool can_cast(const NormTensors& tensors) {
  if (!tensors.residual) {
    return false;
  }
  const at::ScalarType input = tensors.input.scalar_type();
  const at::ScalarType residual = tensors.residual->scalar_type();
  return is_supported(input) && is_supported(residual) && !is_supported_pair(input, residual);
}

bool shares_gradient(const BackwardOptions& options) {
  return options.dropout_p == 0 &&
         options.residual_dtype.value_or(options.input_dtype) == options.input_dtype;
}

void check_dense(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.layout() == at::kStrided && !tensor.is_nested(), op, ": ", name,
              " must be a dense (strided) tensor, got ",
              tensor.is_nested() ? "a nested one of layout " : "layout ", tensor.layout());
}

void check_rows(const char* op, const char* name, const at::Tensor& tensor) {
  check_dense(op, name, tensor);
  TORCH_CHECK_NOT_IMPLEMENTED(is_supported(tensor.scalar_type()), op, ": not implemented for '",
                              tensor.scalar_type(), "': ", name,
                              " must be float16, bfloat16, float32 or float64");
}

void check_device(const char* op, const char* name, const at::Tensor& tensor,
                  const at::Tensor& input) {
  TORCH_CHECK(tensor.device() == input.device(), op, ": ", name, ": Tensor on device ",
              tensor.device(), " is not on the expected device ", input.device(), " of input");
}

void check_param_kind(const char* op, const char* name, const OptionalTensor& param,
                      const at::Tensor& input) {
  if (param) {
    check_dense(op, name, *param);
    check_param_dtype(op, name, param->scalar_type());
    check_device(op, name, *param, input);
  }
}

void check_same_shape(const char* op, const char* name, const at::Tensor& tensor,
                      const at::Tensor& input) {
  TORCH_CHECK(tensor.sizes() == input.sizes(), op, ": ", name, " must have the shape of input, ",
              input.sizes(), ", got ", tensor.sizes());
}

void check_precision(const char* op, const char* name, const at::Tensor& tensor,
                     const at::Tensor& input) {
  TORCH_CHECK((tensor.scalar_type() == at::kDouble) == (input.scalar_type() == at::kDouble), op,
              ": ", name, " of ", tensor.scalar_type(), " does not fit input of ",
              input.scalar_type(), ": both or none must be float64");
}

void check_grad(const char* op, const char* name, const at::Tensor& grad, const at::Tensor& input) {
  check_rows(op, name, grad);
  check_device(op, name, grad, input);
  check_same_shape(op, name, grad, input);
  TORCH_CHECK(grad.scalar_type() == input.scalar_type(), op, ": ", name,
              " must have the dtype of input, ", input.scalar_type(), ", got ", grad.scalar_type());
}

void check_param_shape(const char* op, const char* name, const OptionalTensor& param,
                       at::IntArrayRef normalized_shape, const at::Tensor& input) {
  TORCH_CHECK(!param || param->sizes() == normalized_shape, op, ": Expected ", name,
              " to be of same shape as normalized_shape, but got ", name, " of shape ",
              param->sizes(), " and normalized_shape = ", normalized_shape,
              " (the last dimensions of input of shape ", input.sizes(), ")");
}

void check_stats(const char* op, const at::Tensor& stats, NormKind norm, const at::Tensor& x,
                 std::int64_t rows) {
  const std::array<std::int64_t, 2> shape = {stats_rows(norm), rows};
  const at::ScalarType dtype = stats_dtype(x.scalar_type());
  TORCH_CHECK(stats.layout() == at::kStrided && stats.sizes() == at::IntArrayRef(shape) &&
                  stats.scalar_type() == dtype && stats.device() == x.device(),
              op, ": stats must be what norm_forward returned for x: ", dtype, " of shape ",
              at::IntArrayRef(shape), " on ", x.device(), ", got ", stats.scalar_type(),
              " of shape ", stats.sizes(), " on ", stats.device());
}

// Kernels, and PyTorch's copies before them, read at the address they are given. At an address that
// is not a multiple of the element size, the GPU traps and takes the process with it. The CPU reads
// such bytes as they are.
void check_memory(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.unsafeGetTensorImpl()->storage_initialized(), op, ": the memory of ", name,
              ", of shape ", tensor.sizes(), ", is not allocated yet, or was freed");
  if (tensor.is_cuda()) {
    const std::uintptr_t past = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) %
                                static_cast<std::uintptr_t>(tensor.element_size());
    TORCH_CHECK(past == 0, op, ": on a GPU ", name, " must lie at a multiple of its element size, ",
                tensor.element_size(), " bytes, got an address ", past, " bytes past one");
  }
}

void check_memory(const char* op, const char* name, const OptionalTensor& tensor) {
  if (tensor) {
    check_memory(op, name, *tensor);
  }
}

void check_eps(const char* op, double eps) {
  TORCH_CHECK_VALUE(std::isfinite(eps), op, ": eps must be finite, got ", eps);
}

void check_kinds(const char* op, const NormTensors& tensors, const NormOptions& options) {
  check_eps(op, options.eps);
  const at::Tensor& input = tensors.input;
  check_rows(op, "input", input);
  if (tensors.residual) {
    check_residual_kind(op, *tensors.residual, input, options.sum_dtype);
  }
  const OptionalDtype output_dtype = options.output_dtype;
  TORCH_CHECK(!output_dtype || is_supported_output(input.scalar_type(), *output_dtype), op,
              ": out_dtype must be ",
              input.scalar_type() == at::kDouble  ? "Double"
              : input.scalar_type() == at::kFloat ? "Float, Half or BFloat16"
              : input.scalar_type() == at::kHalf  ? "Half or Float"
                                                  : "BFloat16 or Float",
              " for input of ", input.scalar_type(), ", got ", *output_dtype);
  check_param_kind(op, "weight", tensors.weight, input);
  check_param_kind(op, "bias", tensors.bias, input);
}

Shape checked_shape(const char* op, const at::Tensor& x, std::int64_t normalized_ndim) {
  TORCH_CHECK(x.dim() > 0, op, ": input must have at least one dimension, got a 0-dim tensor");
  TORCH_CHECK(normalized_ndim > 0, op,
              ": Expected normalized_shape to be at least 1-dimensional, i.e., containing at least "
              "one element, but got normalized_shape = [] (",
              normalized_ndim, " dimensions)");
  TORCH_CHECK(normalized_ndim <= x.dim(), op, ": cannot normalise over the last ", normalized_ndim,
              " dimensions of input of shape ", x.sizes());
  return Shape(x, normalized_ndim);
}

void check_call(const char* op, const NormTensors& tensors, const NormOptions& options,
                const Shape& shape) {
  check_bias_allowed(op, options.norm, tensors.bias.has_value());
  if (tensors.residual) {
    check_same_shape(op, "residual", *tensors.residual, tensors.input);
  }
  check_param_shape(op, "weight", tensors.weight, shape.normalized, tensors.input);
  check_param_shape(op, "bias", tensors.bias, shape.normalized, tensors.input);
  check_dropout(op, options.dropout_p, tensors.rng_state, tensors.input);
}

void check_call(const char* op, const BackwardTensors& tensors, const BackwardOptions& options) {
  const at::Tensor& x = tensors.x;
  check_rows(op, "x", x);
  check_rows(op, "grad_output", tensors.grad_output);
  check_device(op, "grad_output", tensors.grad_output, x);
  check_bias_allowed(op, options.norm, options.wanted[3] || tensors.bias.has_value());
  const Shape shape = checked_shape(op, x, options.normalized_ndim);
  check_same_shape(op, "grad_output", tensors.grad_output, x);
  if (tensors.grad_sum) {
    check_grad(op, "grad_sum", *tensors.grad_sum, x);
  }
  check_backward_dtypes(op, tensors, options);
  check_param_kind(op, "weight", tensors.weight, x);
  check_param_kind(op, "bias", tensors.bias, x);
  check_param_shape(op, "weight", tensors.weight, shape.normalized, x);
  check_param_shape(op, "bias", tensors.bias, shape.normalized, x);
  check_dropout(op, options.dropout_p, tensors.rng_state, x);
  TORCH_CHECK(!options.x_is_output || (options.dropout_p == 0 && !options.residual_dtype), op,
              ": the output stands for x only without dropout and without a residual");
  TORCH_CHECK(!tensors.grad_sum || options.residual_dtype, op,
              ": there is no sum without a residual");
  TORCH_CHECK(!options.wanted[1] || options.residual_dtype || options.dropout_p == 0, op,
              ": a gradient of the residual is wanted, and there is none");
  check_stats(op, tensors.stats, options.norm, x, shape.rows);
}

void check_main_grads(const char* op, const MainGrads& main_grads, bool weight_wanted,
                      bool bias_wanted, const at::Tensor& x, std::int64_t normalized_ndim) {
  const at::IntArrayRef shape = checked_shape(op, x, normalized_ndim).normalized;
  TORCH_CHECK(
      weight_wanted == main_grads.weight.has_value() && bias_wanted == main_grads.bias.has_value(),
      op, ": of the wanted gradients of weight and bias, either all or none have a main_grad");
  TORCH_CHECK(stats_dtype(x.scalar_type()) == at::kFloat, op,
              ": main_grad is a Float tensor, and x must not be Double");
  for (const auto* const given : {&main_grads.weight, &main_grads.bias}) {
    TORCH_CHECK(!*given || ((*given)->scalar_type() == at::kFloat && (*given)->sizes() == shape &&
                            (*given)->is_contiguous() && (*given)->device() == x.device()),
                op, ": main_grad must be a contiguous Float tensor of shape ", shape, " on ",
                x.device(), ", got ", (*given)->scalar_type(), " of shape ", (*given)->sizes(),
                " on ", (*given)->device());
  }
}

void check_memory(const char* op, const NormTensors& tensors) {
  check_memory(op, "input", tensors.input);
  check_memory(op, "residual", tensors.residual);
  check_memory(op, "weight", tensors.weight);
  check_memory(op, "bias", tensors.bias);
  check_memory(op, "rng_state", tensors.rng_state);
}

void check_all_memory(const char* op,
                      std::initializer_list<std::pair<const char*, const at::Tensor*>> tensors) {
  for (const auto& [name, tensor] : tensors) {
    if (tensor != nullptr && tensor->numel() > 0) {
      check_memory(op, name, *tensor);
    }
  }
}

void check_memory(const char* op, const BackwardTensors& tensors, const MainGrads& main_grads) {
  check_memory(op, "grad_output", tensors.grad_output);
  check_memory(op, "grad_sum", tensors.grad_sum);
  check_memory(op, "x", tensors.x);
  check_memory(op, "weight", tensors.weight);
  check_memory(op, "bias", tensors.bias);
  check_memory(op, "stats", tensors.stats);
  check_memory(op, "rng_state", tensors.rng_state);
  check_memory(op, "main_grad of weight", main_grads.weight);
  check_memory(op, "main_grad of bias", main_grads.bias);
}

}  // namespace fused_op
