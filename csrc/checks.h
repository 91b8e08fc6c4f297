// What an op accepts, and an error message for everything else: op, expectation, finding. Where
// PyTorch's own layer_norm and rms_norm have an error for the same mistake, the message contains
// theirs and has its exception type, so code that looks for it keeps working.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "fused_op.h"
#include "kernel_arguments.h"

namespace fused_op {

// "layer_norm" and "rms_norm", the names used by the dispatcher and Python.
NormKind parse_norm(std::string_view norm);
std::string_view name_of(NormKind norm);

// "once" and "before_weight", likewise.
Rounding parse_rounding(std::string_view rounding);
std::string_view name_of(Rounding rounding);

// The name of the public function that the user called.
const char* op_name(NormKind norm, bool adds_residual);

// How many trailing dimensions a call normalises: by default those of its weight, else those of its
// bias, else one.
std::int64_t normalized_ndim(const NormTensors& tensors, const NormOptions& options);

// Other rows must have the dtype of the input; beside a 16-bit input they may also be f32. Kernels
// read parameters of these dtypes directly. Others are converted first: kernel_arguments.h.
bool is_supported_pair(at::ScalarType input, at::ScalarType other);

// Whether the dtypes of the rows do not fit together, but would after a cast.
bool can_cast(const NormTensors& tensors);

// Whether input and residual share one gradient.
bool shares_gradient(const BackwardOptions& options);

// "silu" or nothing: whether there is an activation behind the norm.
bool parse_silu(std::optional<std::string_view> activation);

void check_eps(const char* op, double eps);

// Checks eps, layouts, dtypes and devices, for every kind of tensor, including fake, sharded and
// transformed ones.
void check_kinds(const char* op, const NormTensors& tensors, const NormOptions& options);
void check_dense(const char* op, const char* name, const at::Tensor& tensor);

// Checks of one tensor: that kernels take its layout and dtype, as rows or as a parameter; that it
// is on the device of the input, or has a given shape; that `stats` belongs to x; and last, that it
// has memory, at an address that a GPU can read.
void check_rows(const char* op, const char* name, const at::Tensor& tensor);
// The residual, and the sum if its dtype is given, may be wider than a 16-bit input.
void check_residual_kind(const char* op, const at::Tensor& residual, const at::Tensor& input,
                         OptionalDtype sum_dtype);
void check_param_kind(const char* op, const char* name, const OptionalTensor& param,
                      const at::Tensor& input);
void check_device(const char* op, const char* name, const at::Tensor& tensor,
                  const at::Tensor& input);
void check_same_shape(const char* op, const char* name, const at::Tensor& tensor,
                      const at::Tensor& input);
// f64 goes only with f64.
void check_precision(const char* op, const char* name, const at::Tensor& tensor,
                     const at::Tensor& input);
// All four: that a gradient is like the input.
void check_grad(const char* op, const char* name, const at::Tensor& grad, const at::Tensor& input);
void check_param_shape(const char* op, const char* name, const OptionalTensor& param,
                       at::IntArrayRef normalized_shape, const at::Tensor& input);
void check_stats(const char* op, const at::Tensor& stats, NormKind norm, const at::Tensor& x,
                 std::int64_t rows);
void check_memory(const char* op, const char* name, const at::Tensor& tensor);
void check_memory(const char* op, const char* name, const OptionalTensor& tensor);

// The rows and columns of a call. Checks that x has enough dimensions.
Shape checked_shape(const char* op, const at::Tensor& x, std::int64_t normalized_ndim);

// Checks everything else about a call whose tensors a kernel is about to read.
void check_call(const char* op, const NormTensors& tensors, const NormOptions& options,
                const Shape& shape);
void check_call(const char* op, const BackwardTensors& tensors, const BackwardOptions& options);
void check_main_grads(const char* op, const MainGrads& main_grads, bool weight_wanted,
                      bool bias_wanted, const at::Tensor& x, std::int64_t normalized_ndim);

// Checks that there is memory, and on a GPU that its address is readable.
void check_memory(const char* op, const NormTensors& tensors);
void check_memory(const char* op, const BackwardTensors& tensors, const MainGrads& main_grads);

// The same for each of these that is not null and has elements.
void check_all_memory(const char* op,
                      std::initializer_list<std::pair<const char*, const at::Tensor*>> tensors);
inline const at::Tensor* pointer_to(const OptionalTensor& tensor) {
  return tensor ? &*tensor : nullptr;
}

}  // namespace fused_op
