// How a call's tensors become what kernels can read: rows, parameters, dropout. What they cannot
// read as it lies is copied here. Included by norm.cpp only.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/MaybeOwned.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

#include "checks.h"
#include "core/norm_args.h"
#include "core/pack.h"
#include "fused_op.h"

namespace fused_op {

inline DType to_dtype(at::ScalarType dtype) {
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

inline at::ScalarType stats_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

inline std::int64_t stats_rows(NormKind kind) { return kind == NormKind::kLayerNorm ? 2 : 1; }

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

// How a kernel finds the rows of a tensor.
struct RowLayout {
  std::int64_t stride;
  std::uint32_t inner = 0;  // rows until the outer stride takes over; 0: never
  std::int64_t outer_stride = 0;
};

// The layout, if every row is dense and its rows are one or two strides apart.
inline std::optional<RowLayout> row_layout(const at::Tensor& tensor, const Shape& shape) {
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
      constexpr std::int64_t kMaxRows = std::int64_t{1} << 31;  // as RowSplit divides
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

inline bool is_aligned(const at::Tensor& tensor, std::uintptr_t bytes) {
  return reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % bytes == 0;
}

// Whether the GPU may read its rows at two strides: norm_args.h.
inline bool is_short(const at::Tensor& tensor, const Shape& shape) {
  return shape.cols * tensor.element_size() <= kMaxSplitBytes;
}

// A tensor for as long as a call lasts: one of the arguments, without the cost of counting another
// reference to it, or a copy.
using Borrowed = c10::MaybeOwned<at::Tensor>;

inline Borrowed borrow_or_copy(const at::Tensor& tensor, bool readable) {
  return readable ? Borrowed::borrowed(tensor)
                  : Borrowed::owned(tensor.clone(at::MemoryFormat::Contiguous));
}

// Arguments as kernels can read them: the tensor itself where possible, else a contiguous copy.
// Addresses must be multiples of the element size; those of views of raw bytes may be others.
inline Borrowed readable_rows(const at::Tensor& tensor, const Shape& shape, bool in_vectors,
                              bool may_be_split) {
  const std::optional<RowLayout> layout = row_layout(tensor, shape);
  const bool is_split = layout && layout->inner != 0 && tensor.is_cuda();
  std::uintptr_t alignment = tensor.element_size();
  bool readable = layout && (!is_split || (may_be_split && is_short(tensor, shape)));
  if (readable && (is_split || (in_vectors && tensor.is_cuda()))) {
    alignment = kVectorBytes;
    for (const std::int64_t elements : {shape.cols, layout->stride, layout->outer_stride}) {
      readable = readable && elements * tensor.element_size() % kVectorBytes == 0;
    }
  }
  return borrow_or_copy(tensor, readable && is_aligned(tensor, alignment));
}

inline Borrowed readable_dense(const at::Tensor& tensor, std::uintptr_t alignment) {
  return borrow_or_copy(tensor, is_aligned(tensor, alignment) && tensor.is_contiguous());
}

// The GPU reads parameters in vectors, however the rows lie: a view into a tensor may be copied.
inline Borrowed readable_parameter(const OptionalTensor& tensor) {
  if (!tensor) {
    return Borrowed();
  }
  return readable_dense(*tensor, tensor->is_cuda() ? kVectorBytes : tensor->element_size());
}

// The dtype of the parameters that a kernel reads, and of the gradients that it writes for them.
// It is theirs if a kernel takes both beside the input, else that of the arithmetic: they are
// converted. So they are where 1 + weight is meant: 16 bits would lose some of it.
inline at::ScalarType kernel_param_dtype(at::ScalarType input, at::ScalarType param,
                                         const OptionalTensor& weight, const OptionalTensor& bias,
                                         bool zero_centered) {
  const bool is_read = is_supported_pair(input, param) && !(zero_centered && weight) &&
                       (!weight || weight->scalar_type() == param) &&
                       (!bias || bias->scalar_type() == param);
  return is_read ? param : stats_dtype(input);
}

// The parameters that kernels multiply by and add, in the dtype that they read.
struct Parameters {
  Parameters(const OptionalTensor& given_weight, const OptionalTensor& given_bias,
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

  OptionalTensor converted_weight;
  OptionalTensor converted_bias;
  Borrowed weight;  // undefined: absent
  Borrowed bias;
};

inline ConstRows const_rows(const at::Tensor& readable, const Shape& shape) {
  const RowLayout layout = *row_layout(readable, shape);
  ConstRows rows{readable.const_data_ptr(), to_dtype(readable.scalar_type()), layout.stride, {}};
  if (layout.inner != 0) {
    rows.split = RowSplit(layout.inner, layout.outer_stride);
  }
  return rows;
}

inline Rows dense_rows(const at::Tensor& tensor) {
  return tensor.defined() ? Rows{tensor.mutable_data_ptr(), to_dtype(tensor.scalar_type())}
                          : Rows{};
}

inline const void* const_pointer(const Borrowed& tensor) {
  return tensor->defined() ? tensor->const_data_ptr() : nullptr;
}

inline void* pointer(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

// p and the state as the kernels take them.
inline Dropout to_dropout(double p, const OptionalTensor& rng_state) {
  Dropout dropout;
  dropout.active = p > 0;
  if (!dropout.active) {
    return dropout;
  }
  // Something is kept unless p is 1. The scale is the inverse of the probability that is left after
  // p is rounded: the mean of what is kept is unbiased for every p.
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

}  // namespace fused_op
