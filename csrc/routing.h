// Which way a call goes: 0.3 us in C++, several in Python. A kernel reads raw pointers, which only
// a plain tensor has. Fake, sharded, transformed or lazily negated tensors have none, or one that
// means something else; they go through the dispatcher. fused_op.cpp binds these to Python.
#pragma once

#include <variant>

#include "fused_op.h"

namespace fused_op {

// Where a call goes that no kernel has taken. python_arguments.h finds the second and the third.
enum class Route {
  kAutograd,   // plain, and a gradient is needed
  kCheck,      // its arguments are unusual, or wrong: Python checks them first
  kDropout,    // usual, but Python draws a mask first
  kDispatch,   // not plain
  kComposite,  // torch.func and forward AD: only PyTorch's own operations have their rules
  kRecord,     // torch.jit.trace records what is called
  kCast,       // autocast is on, and no kernel adds rows of these dtypes as they are
};

// Whether a kernel could read the tensors as they are.
bool is_plain(const NormTensors& tensors);
bool is_plain(const BackwardTensors& tensors);

// norm_forward without statistics, if no gradient is needed and the kernels can take the tensors.
std::variant<ThreeTensors, Route> route_norm(const NormTensors& tensors,
                                             const NormOptions& options);

// norm_forward and norm_backward for tensors of any kind.
ThreeTensors route_norm_forward(const NormTensors& tensors, const NormOptions& options);
FourTensors route_norm_backward(const BackwardTensors& tensors, const BackwardOptions& options);

// norm_backward for plain tensors alone, with main_grads.
FourTensors route_norm_backward_into(const BackwardTensors& tensors, const BackwardOptions& options,
                                     const MainGrads& main_grads);

// Seed and offset for the dropout of a call with this input.
at::Tensor route_dropout_state(const at::Tensor& input);

}  // namespace fused_op
