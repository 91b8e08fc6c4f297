// Turns the tensors of a call into what kernels can read: rows, parameters, dropout. Copies the
// tensors that kernels cannot read in place. norm.cpp and the variants call it; checks.cpp takes
// Shape from it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/MaybeOwned.h>

#include <cstdint>
#include <initializer_list>
#include <optional>

#include "core/norm_args.h"
#include "fused_op.h"

namespace fused_op {

DType to_dtype(at::ScalarType dtype);

inline at::ScalarType stats_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

inline std::int64_t stats_rows(NormKind kind) { return kind == NormKind::kLayerNorm ? 2 : 1; }

// The rows and columns of a tensor, and the shape that the columns came from. It points into x.
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

// A tensor for the duration of a call: either one of the arguments, without the cost of another
// reference, or a copy.
using Borrowed = c10::MaybeOwned<at::Tensor>;

// How the kernel of a call may find rows in the GPU's memory. On the CPU it makes no difference.
struct RowAccess {
  bool may_be_split = false;  // may lie at two strides
  bool in_vectors = false;    // all of them are whole vectors, because some are split
  std::int64_t most_split_bytes = kMaxSplitBytes;  // of a row
};

// For tensors that may lie at two strides. If any does, all must be whole vectors.
RowAccess access_of(std::initializer_list<const at::Tensor*> tensors, const Shape& shape,
                    std::int64_t most_split_bytes = kMaxSplitBytes);

// The tensor itself if a kernel can read its rows, else a contiguous copy. A view of raw bytes is
// copied, too, if its address is not a multiple of the element size.
Borrowed readable_rows(const at::Tensor& tensor, const Shape& shape, RowAccess access);
Borrowed readable_dense(const at::Tensor& tensor, std::uintptr_t alignment);

// For a tensor that is readable.
ConstRows const_rows(const at::Tensor& readable, const Shape& shape);

// The dtype in which a kernel reads parameters and writes their gradients. It is the parameters'
// own if a kernel takes both beside the input, else that of the arithmetic, and they are converted.
// With `1 + weight`, it is always that of the arithmetic, because 16 bits would lose part of the
// sum.
at::ScalarType kernel_param_dtype(at::ScalarType input, at::ScalarType param,
                                  const OptionalTensor& weight, const OptionalTensor& bias,
                                  bool zero_centered);

// The dtype of the parameters as they were given.
at::ScalarType given_dtype(const OptionalTensor& weight, const OptionalTensor& bias,
                           at::ScalarType otherwise);
// kernel_param_dtype() of parameters as they were given; without any, of the input's own dtype.
inline at::ScalarType kernel_param_dtype(at::ScalarType input, const OptionalTensor& weight,
                                         const OptionalTensor& bias = {},
                                         bool zero_centered = false) {
  return kernel_param_dtype(input, given_dtype(weight, bias, input), weight, bias, zero_centered);
}

// The parameters that kernels multiply by and add, in the dtype in which they are read.
struct Parameters {
  Parameters(const OptionalTensor& given_weight, const OptionalTensor& given_bias,
             bool zero_centered, at::ScalarType dtype);

  OptionalTensor converted_weight;
  OptionalTensor converted_bias;
  Borrowed weight;  // undefined: absent
  Borrowed bias;
};

// p and the state, as kernels take them.
Dropout to_dropout(double p, const OptionalTensor& rng_state);

// Undefined tensors become null.
inline const void* const_pointer(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}
inline void* pointer(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

// The arguments of a forward, and the copies that they point into, which live until the kernel has
// been queued. `dtype` is that of the values that are normalised. The caller fills in the results.
class ForwardInputs {
 public:
  ForwardInputs(const NormTensors& tensors, const NormOptions& options, const Shape& shape,
                at::ScalarType dtype);

  NormForwardArgs args;

 private:
  Borrowed input_;
  Borrowed residual_;
  std::optional<Parameters> parameters_;
};

}  // namespace fused_op
