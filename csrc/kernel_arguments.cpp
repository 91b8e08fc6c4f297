#include "kernel_arguments.h"

#include <algorithm>
#include <cmath>

#include "checks.h"
#include "core/pack.h"

namespace fused_op {
namespace {

// Where a kernel finds the rows of a tensor.
struct RowLayout {
  std::int64_t stride;
  std::uint32_t inner = 0;  // rows before the outer stride applies; 0: there is none
  std::int64_t outer_stride = 0;
};

// The layout, if every row is dense and the rows lie at one stride or two.
std::optional<RowLayout> row_layout(const at::Tensor& tensor, const Shape& shape) {
  if (tensor.is_contiguous()) {
    return RowLayout{shape.cols};
  }
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
  RowLayout layout{shape.cols};
  int levels = 0;
  std::int64_t rows = 1;
  for (; dim >= 0; --dim) {
    if (sizes[dim] == 1) {
      continue;  // its stride is never used
    }
    if (levels == 0) {
      layout.stride = strides[dim];
      levels = 1;
    } else if (strides[dim] != expected) {
      constexpr std::int64_t kMaxRows = std::int64_t{1} << 31;  // the limit of RowSplit
      if (levels == 2 || shape.rows >= kMaxRows) {
        return std::nullopt;
      }
      layout.inner = static_cast<std::uint32_t>(rows);
      layout.outer_stride = strides[dim];
      levels = 2;
    }
    expected = strides[dim] * sizes[dim];
    rows *= sizes[dim];
  }
  return layout;
}

bool is_aligned(const at::Tensor& tensor, std::uintptr_t bytes) {
  return reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % bytes == 0;
}

// Whether the rows are short enough for the GPU to read them at two strides.
bool is_short(const at::Tensor& tensor, const Shape& shape, std::int64_t most_bytes) {
  return shape.cols * tensor.element_size() <= most_bytes;
}

// Whether a GPU kernel would read the tensor at two strides.
bool is_split(const at::Tensor& tensor, const Shape& shape, std::int64_t most_bytes) {
  if (!tensor.is_cuda() || !is_short(tensor, shape, most_bytes)) {
    return false;
  }
  const std::optional<RowLayout> layout = row_layout(tensor, shape);
  return layout && layout->inner != 0;
}

Borrowed borrow_or_copy(const at::Tensor& tensor, bool readable) {
  return readable ? Borrowed::borrowed(tensor)
                  : Borrowed::owned(tensor.clone(at::MemoryFormat::Contiguous));
}

// The GPU reads parameters in vectors, whatever the layout of the rows. A view into a tensor may
// have to be copied.
Borrowed readable_parameter(const OptionalTensor& tensor) {
  if (!tensor) {
    return Borrowed();
  }
  return readable_dense(*tensor, tensor->is_cuda() ? kVectorBytes : tensor->element_size());
}

}  // namespace

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

RowAccess access_of(std::initializer_list<const at::Tensor*> tensors, const Shape& shape,
                    std::int64_t most_split_bytes) {
  RowAccess access{.may_be_split = true, .most_split_bytes = most_split_bytes};
  for (const at::Tensor* const tensor : tensors) {
    access.in_vectors = access.in_vectors || is_split(*tensor, shape, most_split_bytes);
  }
  return access;
}

Borrowed readable_rows(const at::Tensor& tensor, const Shape& shape, RowAccess access) {
  const std::optional<RowLayout> layout = row_layout(tensor, shape);
  const bool is_split = layout && layout->inner != 0 && tensor.is_cuda();
  std::uintptr_t alignment = tensor.element_size();
  bool readable =
      layout &&
      (!is_split || (access.may_be_split && is_short(tensor, shape, access.most_split_bytes)));
  if (readable && (is_split || (access.in_vectors && tensor.is_cuda()))) {
    alignment = kVectorBytes;
    for (const std::int64_t elements : {shape.cols, layout->stride, layout->outer_stride}) {
      readable = readable && elements * tensor.element_size() % kVectorBytes == 0;
    }
  }
  return borrow_or_copy(tensor, readable && is_aligned(tensor, alignment));
}

Borrowed readable_dense(const at::Tensor& tensor, std::uintptr_t alignment) {
  return borrow_or_copy(tensor, is_aligned(tensor, alignment) && tensor.is_contiguous());
}

ConstRows const_rows(const at::Tensor& readable, const Shape& shape) {
  const RowLayout layout = *row_layout(readable, shape);
  ConstRows rows{readable.const_data_ptr(), to_dtype(readable.scalar_type()), layout.stride, {}};
  if (layout.inner != 0) {
    rows.split = RowSplit(layout.inner, layout.outer_stride);
  }
  return rows;
}

at::ScalarType kernel_param_dtype(at::ScalarType input, at::ScalarType param,
                                  const OptionalTensor& weight, const OptionalTensor& bias,
                                  bool zero_centered) {
  const bool is_read = is_supported_pair(input, param) && !(zero_centered && weight) &&
                       (!weight || weight->scalar_type() == param) &&
                       (!bias || bias->scalar_type() == param);
  return is_read ? param : stats_dtype(input);
}

at::ScalarType given_dtype(const OptionalTensor& weight, const OptionalTensor& bias,
                           at::ScalarType otherwise) {
  return weight ? weight->scalar_type() : bias ? bias->scalar_type() : otherwise;
}

Parameters::Parameters(const OptionalTensor& given_weight, const OptionalTensor& given_bias,
                       bool zero_centered, at::ScalarType dtype) {
  const auto convert = [dtype](const OptionalTensor& given) {
    const bool is_converted = given && given->scalar_type() != dtype;
    return is_converted ? OptionalTensor(given->to(dtype)) : std::nullopt;
  };
  converted_weight = convert(given_weight);
  converted_bias = convert(given_bias);
  if (zero_centered && given_weight) {
    converted_weight = (converted_weight ? *converted_weight : *given_weight).add(1);
  }
  weight = readable_parameter(converted_weight ? converted_weight : given_weight);
  bias = readable_parameter(converted_bias ? converted_bias : given_bias);
}

Dropout to_dropout(double p, const OptionalTensor& rng_state) {
  Dropout dropout;
  dropout.active = p > 0;
  if (!dropout.active) {
    return dropout;
  }
  // Nothing is kept only if p is 1. The scale is the inverse of the probability that is left after
  // p is rounded, so the mean is unbiased for every p.
  constexpr long kAll = 1 << 16;
  const long dropped = p == 1 ? kAll : std::min(std::lround(p * kAll), kAll - 1);
  dropout.threshold = static_cast<std::uint32_t>(dropped);
  dropout.wide_scale = p == 1 ? 0 : static_cast<double>(kAll) / static_cast<double>(kAll - dropped);
  dropout.scale = static_cast<float>(dropout.wide_scale);
  const auto* const state = rng_state->const_data_ptr<std::int64_t>();
  if (rng_state->is_cpu()) {
    dropout.seed = static_cast<std::uint64_t>(state[0]);
    dropout.offset = static_cast<std::uint64_t>(state[1]);
  } else {
    dropout.state = state;
  }
  return dropout;
}

ForwardInputs::ForwardInputs(const NormTensors& tensors, const NormOptions& options,
                             const Shape& shape, at::ScalarType dtype) {
  const RowAccess access{.may_be_split = !tensors.residual};
  input_ = readable_rows(tensors.input, shape, access);
  residual_ = tensors.residual ? readable_rows(*tensors.residual, shape, access) : Borrowed();
  const at::ScalarType param_dtype = kernel_param_dtype(
      tensors.input.scalar_type(), given_dtype(tensors.weight, tensors.bias, dtype), tensors.weight,
      tensors.bias, options.zero_centered);
  parameters_.emplace(tensors.weight, tensors.bias, options.zero_centered, param_dtype);

  args.kind = options.norm;
  args.dtype = to_dtype(dtype);
  args.param_dtype = to_dtype(param_dtype);
  args.rounding = options.rounding;
  args.rows = shape.rows;
  args.cols = shape.cols;
  args.input = const_rows(*input_, shape);
  if (tensors.residual) {
    args.residual = const_rows(*residual_, shape);
  }
  args.weight = const_pointer(*parameters_->weight);
  args.bias = const_pointer(*parameters_->bias);
  args.eps = options.eps;
  args.dropout = to_dropout(options.dropout_p, tensors.rng_state);
}

}  // namespace fused_op
