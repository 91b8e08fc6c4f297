// What the files of the modulated norms share: modulated_norm.cpp has the ops, and
// modulated_backward.cpp runs their backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "core/modulated.h"
#include "kernel_arguments.h"

namespace fused_op {

// The arguments of both ops. `residual` and `gate` are null without a gated residual.
struct ModulatedCall {
  const char* op;
  NormKind norm;
  const at::Tensor& input;
  const at::Tensor& scale;
  const OptionalTensor& shift;
  const OptionalTensor& weight;
  const OptionalTensor& bias;
  const at::Tensor* residual = nullptr;
  const at::Tensor* gate = nullptr;
};

// The dtypes in which kernels read scale and shift, and weight and bias.
at::ScalarType entry_dtype(const ModulatedCall& call);
at::ScalarType param_dtype_of(const ModulatedCall& call);
// The dtype of entries that a GPU kernel reads as its parameters: 16 bits only if they begin at a
// multiple of 4 bytes.
at::ScalarType dtype_as_parameters(const at::Tensor& of, at::ScalarType dtype);

// Readable forms of scale, shift and gate, or of one of them in place of scale, for the duration of
// a call.
struct ReadableModulation {
  ReadableModulation(const ModulatedCall& call, std::int64_t rows_each, const Shape& shape);
  ReadableModulation(const at::Tensor& of, at::ScalarType dtype, std::int64_t rows_each,
                     const Shape& shape);

  Borrowed scale, shift, gate;
  Modulation made;

 private:
  ConstRows found(const at::Tensor& readable, const Shape& shape) const;
};

// The arguments of a backward call, already checked. `x` is what was normalised.
struct ModulatedPullback {
  const ModulatedCall& call;
  std::int64_t rows_each;
  const at::Tensor& grad_output;
  const OptionalTensor& grad_sum;
  const at::Tensor& x;
  const at::Tensor& stats;
};
// The gradients that are wanted, allocated by the caller: weight and bias in param_dtype_of(),
// scale and shift in entry_dtype().
struct ModulatedGrads {
  at::Tensor input, residual, gate, scale, shift, weight, bias;
};
void run_backward(const ModulatedPullback& pullback, const ModulatedGrads& grads);

}  // namespace fused_op
