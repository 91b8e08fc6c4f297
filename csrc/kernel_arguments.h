// How a call's tensors become what kernels can read: rows, parameters, dropout. What they cannot
// read as it lies is copied here. norm.cpp calls it; checks.cpp knows shapes by it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/MaybeOwned.h>

#include <cstdint>
#include <optional>

#include "core/norm_args.h"
#include "fused_op.h"

namespace fused_op {

DType to_dtype(at::ScalarType dtype);

inline at::ScalarType stats_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

inline std::int64_t stats_rows(NormKind kind) { return kind == NormKind::kLayerNorm ? 2 : 1; }

// How many rows of how many columns, and the shape that the columns came from. It points into x.
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

// A tensor for as long as a call lasts: one of the arguments, without the cost of counting another
// reference to it, or a copy.
using Borrowed = c10::MaybeOwned<at::Tensor>;

// How the kernel of one call may find rows in the GPU's memory; on the CPU neither matters.
struct RowAccess {
  bool may_be_split = false;  // at two strides
  bool in_vectors = false;    // all of them in whole vectors, because some are split
  std::int64_t most_split_bytes = kMaxSplitBytes;  // of a row
};

// Whether a kernel that may would read this tensor on a GPU at two strides.
bool is_split(const at::Tensor& tensor, const Shape& shape,
              std::int64_t most_bytes = kMaxSplitBytes);

// The tensor itself where a kernel can read its rows, else a contiguous copy. Addresses must be
// multiples of the element size; those of views of raw bytes may be others.
Borrowed readable_rows(const at::Tensor& tensor, const Shape& shape, RowAccess access);
Borrowed readable_dense(const at::Tensor& tensor, std::uintptr_t alignment);

// Of something readable.
ConstRows const_rows(const at::Tensor& readable, const Shape& shape);

// The dtype of the parameters that a kernel reads, and of the gradients that it writes for them.
// It is theirs if a kernel takes both beside the input, else that of the arithmetic: they are
// converted. So they are where 1 + weight is meant: 16 bits would lose some of it.
at::ScalarType kernel_param_dtype(at::ScalarType input, at::ScalarType param,
                                  const OptionalTensor& weight, const OptionalTensor& bias,
                                  bool zero_centered);

// The parameters that kernels multiply by and add, in the dtype that they read.
struct Parameters {
  Parameters(const OptionalTensor& given_weight, const OptionalTensor& given_bias,
             bool zero_centered, at::ScalarType dtype);

  OptionalTensor converted_weight;
  OptionalTensor converted_bias;
  Borrowed weight;  // undefined: absent
  Borrowed bias;
};

// p and the state as the kernels take them.
Dropout to_dropout(double p, const OptionalTensor& rng_state);

// Undefined tensors become null.
inline const void* const_pointer(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}
inline void* pointer(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

// What a forward reads of a call: the arguments, and the copies that they point into, which live
// until the kernel has been queued. `dtype` is that of what is normalised. Results are the caller's
// to fill in.
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
