// What an op accepts, and the sentence for everything else: op, expectation, finding. Shared by all
// ops. Where PyTorch's own layer_norm and rms_norm have an error for the same mistake, the sentence
// contains theirs and has its exception type, so that code which looks for it keeps working.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string_view>

namespace fused_op {

// The public function that a user called.
inline const char* op_name(std::string_view norm, bool adds_residual) {
  if (norm == "rms_norm") {
    return adds_residual ? "fused_add_rms_norm" : "fused_rms_norm";
  }
  return adds_residual ? "fused_add_layer_norm" : "fused_layer_norm";
}

inline bool is_supported(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 ||
         dtype == at::kDouble;
}

// Beside an input, other rows have its dtype; beside a 16-bit input they may also be f32. Kernels
// read parameters of these dtypes as they are; others are converted first: kernel_arguments.h.
inline bool is_supported_pair(at::ScalarType input, at::ScalarType other) {
  return is_supported(input) &&
         (other == input || (other == at::kFloat && c10::elementSize(input) == 2));
}

inline void check_eps(const char* op, double eps) {
  TORCH_CHECK_VALUE(std::isfinite(eps), op, ": eps must be finite, got ", eps);
}

inline void check_dense(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.layout() == at::kStrided && !tensor.is_nested(), op, ": ", name,
              " must be a dense (strided) tensor, got ",
              tensor.is_nested() ? "a nested one of layout " : "layout ", tensor.layout());
}

// Layout, dtype and device hold for every kind of tensor, also fake, sharded and transformed ones.
inline void check_input_kind(const char* op, const char* name, const at::Tensor& tensor) {
  check_dense(op, name, tensor);
  TORCH_CHECK_NOT_IMPLEMENTED(is_supported(tensor.scalar_type()), op, ": not implemented for '",
                              tensor.scalar_type(), "': ", name,
                              " must be float16, bfloat16, float32 or float64");
}

inline void check_device(const char* op, const char* name, const at::Tensor& tensor,
                         const at::Tensor& input) {
  TORCH_CHECK(tensor.device() == input.device(), op, ": ", name, ": Tensor on device ",
              tensor.device(), " is not on the expected device ", input.device(), " of input");
}

inline void check_param_dtype(const char* op, const char* name, at::ScalarType dtype) {
  TORCH_CHECK(is_supported(dtype), op,
              ": mixed dtype: expect parameter to have scalar type of Float, Half, BFloat16 or "
              "Double, got ",
              name, " of ", dtype);
}

inline void check_param_kind(const char* op, const char* name, const at::Tensor& param,
                             const at::Tensor& input) {
  check_dense(op, name, param);
  check_param_dtype(op, name, param.scalar_type());
  check_device(op, name, param, input);
}

inline void check_like_input_kind(const char* op, const char* name, const at::Tensor& tensor,
                                  const at::Tensor& input) {
  check_input_kind(op, name, tensor);
  TORCH_CHECK(tensor.scalar_type() == input.scalar_type(), op, ": ", name,
              " must have the dtype of input, ", input.scalar_type(), ", got ",
              tensor.scalar_type());
  check_device(op, name, tensor, input);
}

// A residual, and the sum with it, may be wider than a 16-bit input.
inline void check_residual_kind(const char* op, const at::Tensor& residual, const at::Tensor& input,
                                std::optional<at::ScalarType> sum_dtype) {
  check_input_kind(op, "residual", residual);
  TORCH_CHECK(is_supported_pair(input.scalar_type(), residual.scalar_type()), op,
              ": residual must have the dtype of input, ", input.scalar_type(),
              c10::elementSize(input.scalar_type()) == 2 ? ", or Float" : "", ", got ",
              residual.scalar_type());
  TORCH_CHECK(!sum_dtype || is_supported_pair(residual.scalar_type(), *sum_dtype), op,
              ": residual_dtype must be the dtype of residual, ", residual.scalar_type(),
              c10::elementSize(residual.scalar_type()) == 2 ? ", or Float" : "", ", got ",
              *sum_dtype);
  check_device(op, "residual", residual, input);
}

// The output may be wider than a 16-bit input, or narrower than a f32 one.
inline bool is_supported_output(at::ScalarType input, at::ScalarType output) {
  return is_supported_pair(input, output) ||
         (input == at::kFloat && is_supported(output) && c10::elementSize(output) == 2);
}

inline void check_kinds(const char* op, const at::Tensor& input,
                        const std::optional<at::Tensor>& residual,
                        const std::optional<at::Tensor>& weight,
                        const std::optional<at::Tensor>& bias,
                        std::optional<at::ScalarType> output_dtype,
                        std::optional<at::ScalarType> sum_dtype) {
  check_input_kind(op, "input", input);
  if (residual) {
    check_residual_kind(op, *residual, input, sum_dtype);
  }
  TORCH_CHECK(!output_dtype || is_supported_output(input.scalar_type(), *output_dtype), op,
              ": out_dtype must be ",
              input.scalar_type() == at::kDouble  ? "Double"
              : input.scalar_type() == at::kFloat ? "Float, Half or BFloat16"
              : input.scalar_type() == at::kHalf  ? "Half or Float"
                                                  : "BFloat16 or Float",
              " for input of ", input.scalar_type(), ", got ", *output_dtype);
  if (weight) {
    check_param_kind(op, "weight", *weight, input);
  }
  if (bias) {
    check_param_kind(op, "bias", *bias, input);
  }
}

// Whether the rows' dtypes do not fit together, but would after a cast.
inline bool can_cast(const at::Tensor& input, const std::optional<at::Tensor>& residual) {
  return residual && is_supported(input.scalar_type()) && is_supported(residual->scalar_type()) &&
         !is_supported_pair(input.scalar_type(), residual->scalar_type());
}

inline void check_bias_allowed(const char* op, bool has_mean, bool has_bias) {
  TORCH_CHECK(has_mean || !has_bias, op, ": rms_norm has no bias, so that it must be None");
}

inline void check_same_shape(const char* op, const char* name, const at::Tensor& tensor,
                             const at::Tensor& input) {
  TORCH_CHECK(tensor.sizes() == input.sizes(), op, ": ", name, " must have the shape of input, ",
              input.sizes(), ", got ", tensor.sizes());
}

inline void check_normalized_ndim(const char* op, std::int64_t normalized_ndim,
                                  const at::Tensor& input) {
  TORCH_CHECK(input.dim() > 0, op, ": input must have at least one dimension, got a 0-dim tensor");
  TORCH_CHECK(normalized_ndim > 0, op,
              ": Expected normalized_shape to be at least 1-dimensional, i.e., containing at least "
              "one element, but got normalized_shape = [] (",
              normalized_ndim, " dimensions)");
  TORCH_CHECK(normalized_ndim <= input.dim(), op, ": cannot normalise over the last ",
              normalized_ndim, " dimensions of input of shape ", input.sizes());
}

inline void check_param_shape(const char* op, const char* name, const at::Tensor& param,
                              at::IntArrayRef normalized_shape, const at::Tensor& input) {
  TORCH_CHECK(param.sizes() == normalized_shape, op, ": Expected ", name,
              " to be of same shape as normalized_shape, but got ", name, " of shape ",
              param.sizes(), " and normalized_shape = ", normalized_shape,
              " (the last dimensions of input of shape ", input.sizes(), ")");
}

inline void check_dropout(const char* op, double p, const std::optional<at::Tensor>& rng_state,
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

// Kernels, and PyTorch's own copies before them, read what they get. The GPU traps at an address
// that is no multiple of the element size, and takes the process with it; the CPU reads bytewise.
inline void check_memory(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.unsafeGetTensorImpl()->storage_initialized(), op, ": the memory of ", name,
              ", of shape ", tensor.sizes(), ", is not allocated yet, or was freed");
  if (tensor.is_cuda()) {
    const std::uintptr_t past = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) %
                                static_cast<std::uintptr_t>(tensor.element_size());
    TORCH_CHECK(past == 0, op, ": on a GPU ", name, " must lie at a multiple of its element size, ",
                tensor.element_size(), " bytes, got an address ", past, " bytes past one");
  }
}
inline void check_memory(const char* op, const char* name,
                         const std::optional<at::Tensor>& tensor) {
  if (tensor) {
    check_memory(op, name, *tensor);
  }
}

// Whether input and residual have one gradient.
inline bool shares_gradient(double dropout_p, at::ScalarType input_dtype,
                            std::optional<at::ScalarType> residual_dtype) {
  return dropout_p == 0 && residual_dtype.value_or(input_dtype) == input_dtype;
}

// Backward may see neither the input nor the parameters, so that their dtypes are arguments.
inline void check_backward_dtypes(const char* op, at::ScalarType x, at::ScalarType grad_output,
                                  at::ScalarType input, std::optional<at::ScalarType> residual,
                                  at::ScalarType param) {
  const bool one_precision = (x == at::kDouble) == (grad_output == at::kDouble);
  TORCH_CHECK(one_precision, op, ": grad_output of ", grad_output, " does not fit x of ", x);
  TORCH_CHECK(is_supported(input) && (x == at::kDouble) == (input == at::kDouble), op,
              ": input_dtype of ", input, " does not fit x of ", x);
  TORCH_CHECK(!residual || is_supported_pair(input, *residual), op,
              ": residual_dtype must be input_dtype, or fit it, got ", residual.value_or(input));
  check_param_dtype(op, "param_dtype", param);
}

inline void check_param(const char* op, const char* name, const at::Tensor& param,
                        at::IntArrayRef normalized_shape, const at::Tensor& x) {
  check_param_kind(op, name, param, x);
  check_param_shape(op, name, param, normalized_shape, x);
}

inline void check_main_grads(const char* op, std::array<bool, 2> wanted,
                             const std::optional<at::Tensor>& weight,
                             const std::optional<at::Tensor>& bias, at::IntArrayRef shape,
                             at::ScalarType compute, at::Device device) {
  TORCH_CHECK(wanted[0] == weight.has_value() && wanted[1] == bias.has_value(), op,
              ": of the wanted gradients of weight and bias, either all or none have a main_grad");
  TORCH_CHECK(compute == at::kFloat, op, ": main_grad is a Float tensor, and x must not be Double");
  for (const auto* const main_grad : {&weight, &bias}) {
    TORCH_CHECK(!*main_grad ||
                    ((*main_grad)->scalar_type() == at::kFloat && (*main_grad)->sizes() == shape &&
                     (*main_grad)->is_contiguous() && (*main_grad)->device() == device),
                op, ": main_grad must be a contiguous Float tensor of shape ", shape, " on ",
                device, ", got ", (*main_grad)->scalar_type(), " of shape ", (*main_grad)->sizes(),
                " on ", (*main_grad)->device());
  }
}

inline void check_stats(const char* op, const at::Tensor& stats, at::IntArrayRef shape,
                        at::ScalarType dtype, at::Device device) {
  TORCH_CHECK(stats.layout() == at::kStrided && stats.sizes() == shape &&
                  stats.scalar_type() == dtype && stats.device() == device,
              op, ": stats must be what norm_forward returned for x: ", dtype, " of shape ", shape,
              " on ", device, ", got ", stats.scalar_type(), " of shape ", stats.sizes(), " on ",
              stats.device());
}

}  // namespace fused_op
