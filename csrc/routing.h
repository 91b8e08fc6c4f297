// Which way a call goes. Deciding takes 0.3 us in C++, and several in Python. A kernel reads raw
// pointers, which only a plain tensor has. Fake, sharded, transformed or lazily negated tensors
// have none, or one that means something else; they go through the dispatcher. fused_op.cpp binds
// these functions to Python.
#pragma once

#include <variant>

#include "fused_op.h"

namespace fused_op {

// Where a call goes that no kernel takes. python_arguments.h finds kCheck and kDropout.
enum class Route {
  kAutograd,   // plain, and a gradient is needed
  kCheck,      // its arguments are unusual, or wrong: Python checks them first
  kDropout,    // usual, but Python has to draw a mask first
  kDispatch,   // a tensor is not plain
  kComposite,  // torch.func and forward AD: only PyTorch's own operations have their rules
  kRecord,     // torch.jit.trace is recording
  kCast,       // autocast is on, and no kernel adds rows of these dtypes
};

// Whether a kernel could read the tensors as they are.
bool is_plain(const NormTensors& tensors);
bool is_plain(const BackwardTensors& tensors);

// norm_forward without statistics, if no gradient is needed and kernels can take the tensors.
std::variant<ThreeTensors, Route> route_norm(const NormTensors& tensors,
                                             const NormOptions& options);

// norm_forward and norm_backward for any kind of tensor.
ThreeTensors route_norm_forward(const NormTensors& tensors, const NormOptions& options);
FourTensors route_norm_backward(const BackwardTensors& tensors, const BackwardOptions& options);

// norm_backward with main_grads, for plain tensors only.
FourTensors route_norm_backward_into(const BackwardTensors& tensors, const BackwardOptions& options,
                                     const MainGrads& main_grads);

// Seed and offset for the dropout of a call with this input.
at::Tensor route_dropout_state(const at::Tensor& input);

}  // namespace fused_op
