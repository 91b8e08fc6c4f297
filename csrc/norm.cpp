// The op layer: check, allocate, fill the arguments, run on the backend. Both ops read like that
// from top to bottom. Torch tensors end here; CUDA and Python are not known here.
#include <algorithm>
#include <cstdint>

#include "backend.h"
#include "checks.h"
#include "core/norm_args.h"
#include "core/pack.h"
#include "fused_op.h"

namespace fused_op {
namespace {

NormKind parse_norm(std::string_view norm) {
  TORCH_CHECK_VALUE(norm == "layer_norm" || norm == "rms_norm",
                    "fused_op: norm must be 'layer_norm' or 'rms_norm', got '", norm, "'");
  return norm == "layer_norm" ? NormKind::kLayerNorm : NormKind::kRmsNorm;
}

DType to_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kDouble:
      return DType::kFloat64;
    default:
      TORCH_INTERNAL_ASSERT(dtype == at::kFloat);
      return DType::kFloat32;
  }
}

at::ScalarType stats_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

std::int64_t stats_rows(NormKind kind) { return kind == NormKind::kLayerNorm ? 2 : 1; }

// How many rows of how many columns, and the shape that the columns came from.
struct Shape {
  Shape(const at::Tensor& x, std::int64_t normalized_ndim)
      : leading(x.sizes().slice(0, x.dim() - normalized_ndim)),
        normalized(x.sizes().slice(x.dim() - normalized_ndim)),
        rows(c10::multiply_integers(leading)),
        cols(c10::multiply_integers(normalized)) {}

  at::IntArrayRef leading;
  at::IntArrayRef normalized;
  std::int64_t rows;
  std::int64_t cols;

  bool empty() const { return rows == 0 || cols == 0; }
};

// The distance from row to row, if every row is dense and that distance is always the same.
std::optional<std::int64_t> row_stride(const at::Tensor& tensor, const Shape& shape) {
  const at::IntArrayRef sizes = tensor.sizes();
  const at::IntArrayRef strides = tensor.strides();
  const auto leading = static_cast<std::int64_t>(shape.leading.size());
  std::int64_t expected = 1;
  std::int64_t dim = tensor.dim() - 1;
  for (; dim >= leading; --dim) {
    if (sizes[dim] != 1 && strides[dim] != expected) {
      return std::nullopt;
    }
    expected *= sizes[dim];
  }
  std::optional<std::int64_t> stride;
  for (; dim >= 0; --dim) {
    if (sizes[dim] == 1) {
      continue;  // its stride is never used
    }
    if (!stride) {
      stride = strides[dim];
    } else if (strides[dim] != expected) {
      return std::nullopt;
    }
    expected = strides[dim] * sizes[dim];
  }
  return stride.value_or(shape.cols);
}

bool is_aligned(const at::Tensor& tensor, std::uintptr_t bytes) {
  TORCH_CHECK(tensor.unsafeGetTensorImpl()->storage_initialized(),
              "fused_op: the memory of a tensor of shape ", tensor.sizes(),
              " is not allocated yet, or was freed");
  return reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % bytes == 0;
}

// Arguments as kernels can read them: the tensor itself where possible, else a contiguous copy.
// Addresses must be multiples of the element size; those of views of raw bytes may be others.
at::Tensor readable_rows(const at::Tensor& tensor, const Shape& shape) {
  const bool readable = is_aligned(tensor, tensor.element_size()) && row_stride(tensor, shape);
  return readable ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

at::Tensor readable_dense(const at::Tensor& tensor, std::uintptr_t alignment) {
  const bool readable = is_aligned(tensor, alignment) && tensor.is_contiguous();
  return readable ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

// The GPU reads parameters in vectors, however the rows lie: a view into a tensor may be copied.
OptionalTensor readable_parameters(const OptionalTensor& tensor) {
  if (!tensor) {
    return std::nullopt;
  }
  return readable_dense(*tensor, tensor->is_cuda() ? kVectorBytes : tensor->element_size());
}

// The parameters that kernels multiply by and add. Where 1 + weight is meant, it is made here, in
// the dtype of the arithmetic, which keeps what 16 bits would lose of it; the bias follows its
// dtype.
struct Parameters {
  Parameters(OptionalTensor given_weight, OptionalTensor given_bias, bool zero_centered,
             at::ScalarType compute) {
    if (zero_centered && given_weight) {
      given_weight = given_weight->to(compute).add(1);
      given_bias = given_bias ? OptionalTensor(given_bias->to(compute)) : std::nullopt;
    }
    weight = readable_parameters(given_weight);
    bias = readable_parameters(given_bias);
  }

  OptionalTensor weight;
  OptionalTensor bias;
};

ConstRows const_rows(const at::Tensor& readable, const Shape& shape) {
  return {readable.const_data_ptr(), *row_stride(readable, shape)};
}

const void* const_pointer(const OptionalTensor& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}

void* pointer(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

}  // namespace

ThreeTensors norm_forward(std::string_view norm, const at::Tensor& input,
                          const OptionalTensor& residual, const OptionalTensor& weight,
                          const OptionalTensor& bias, std::int64_t normalized_ndim, double eps,
                          bool zero_centered, bool save_stats) {
  const NormKind kind = parse_norm(norm);
  const char* const op = op_name(norm, residual.has_value());
  check_eps(op, eps);
  check_kinds(op, input, residual, weight, bias);
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

  const at::ScalarType dtype = input.scalar_type();
  const at::Device device = input.device();
  const at::Tensor output = backend::empty(input.sizes(), dtype, device);
  at::Tensor sum;
  if (residual) {
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

  // These own what the pointers point into until the kernel has been queued.
  const at::Tensor input_rows = readable_rows(input, shape);
  const at::Tensor residual_rows = residual ? readable_rows(*residual, shape) : at::Tensor();
  const Parameters parameters(weight, bias, zero_centered, stats_dtype(dtype));
  const OptionalTensor& any = parameters.weight ? parameters.weight : parameters.bias;

  NormForwardArgs args;
  args.kind = kind;
  args.dtype = to_dtype(dtype);
  args.param_dtype = to_dtype(any ? any->scalar_type() : dtype);
  args.rows = shape.rows;
  args.cols = shape.cols;
  args.input = const_rows(input_rows, shape);
  if (residual) {
    args.residual = const_rows(residual_rows, shape);
  }
  args.weight = const_pointer(parameters.weight);
  args.bias = const_pointer(parameters.bias);
  args.output = pointer(output);
  args.sum = pointer(sum);
  args.stats = pointer(stats);
  args.eps = eps;
  backend::norm_forward(args, device);
  return {output, sum, stats};
}

ThreeTensors norm_backward(std::string_view norm, const at::Tensor& grad_output,
                           const OptionalTensor& grad_sum, const at::Tensor& x,
                           const OptionalTensor& weight, const at::Tensor& stats,
                           std::int64_t normalized_ndim, bool zero_centered,
                           at::ScalarType param_dtype, std::array<bool, 3> wanted) {
  const NormKind kind = parse_norm(norm);
  const char* const op = "fused_op::norm_backward";
  check_kinds(op, x, std::nullopt, weight, std::nullopt);
  check_like_input_kind(op, "grad_output", grad_output, x);
  check_bias_allowed(op, kind == NormKind::kLayerNorm, wanted[2]);
  check_normalized_ndim(op, normalized_ndim, x);
  const Shape shape(x, normalized_ndim);
  check_same_shape(op, "grad_output", grad_output, x);
  if (grad_sum) {
    check_like_input_kind(op, "grad_sum", *grad_sum, x);
    check_same_shape(op, "grad_sum", *grad_sum, x);
  }
  if (weight) {
    check_param_shape(op, "weight", *weight, shape.normalized, x);
  }
  const at::ScalarType dtype = x.scalar_type();
  const at::Device device = x.device();
  check_param_dtype(op, weight, param_dtype, dtype);
  check_stats(op, stats, {stats_rows(kind), shape.rows}, stats_dtype(dtype), device);

  // As Parameters has them; their gradients are rounded to the dtype that is asked for at the end.
  const at::ScalarType kernel_dtype = zero_centered && weight ? stats_dtype(dtype) : param_dtype;
  at::Tensor grad_input, grad_weight, grad_bias;
  if (wanted[0]) {
    grad_input = backend::empty(x.sizes(), dtype, device);
  }
  if (wanted[1]) {
    grad_weight = backend::empty(shape.normalized, kernel_dtype, device);
  }
  if (wanted[2]) {
    grad_bias = backend::empty(shape.normalized, kernel_dtype, device);
  }
  const auto results = [&]() -> ThreeTensors {
    const auto rounded = [&](const at::Tensor& gradient) {
      return gradient.defined() ? gradient.to(param_dtype) : gradient;
    };
    return {grad_input, rounded(grad_weight), rounded(grad_bias)};
  };
  if (shape.empty()) {
    for (at::Tensor* const gradient : {&grad_weight, &grad_bias}) {
      if (gradient->defined()) {
        gradient->zero_();
      }
    }
    return results();
  }

  const at::Tensor x_rows = readable_rows(x, shape);
  const at::Tensor grad_output_rows = readable_rows(grad_output, shape);
  const at::Tensor grad_sum_rows = grad_sum ? readable_rows(*grad_sum, shape) : at::Tensor();
  const Parameters parameters(weight, std::nullopt, zero_centered, stats_dtype(dtype));
  const at::Tensor dense_stats = readable_dense(stats, stats.element_size());

  NormBackwardArgs args;
  args.kind = kind;
  args.dtype = to_dtype(dtype);
  args.param_dtype = to_dtype(kernel_dtype);
  args.rows = shape.rows;
  args.cols = shape.cols;
  args.x = const_rows(x_rows, shape);
  args.grad_output = const_rows(grad_output_rows, shape);
  if (grad_sum) {
    args.grad_sum = const_rows(grad_sum_rows, shape);
  }
  args.weight = const_pointer(parameters.weight);
  args.stats = dense_stats.const_data_ptr();
  args.grad_input = pointer(grad_input);
  args.grad_weight = pointer(grad_weight);
  args.grad_bias = pointer(grad_bias);
  const auto bytes = static_cast<std::int64_t>(backend::norm_backward_workspace(args, device));
  const at::Tensor workspace =
      bytes > 0 ? backend::empty({bytes}, at::kByte, device) : at::Tensor();
  args.workspace = pointer(workspace);
  backend::norm_backward(args, device);
  return results();
}

}  // namespace fused_op
