// The gradient of calls of plain tensors, as a node of autograd in C++: its backward needs no
// Python, which would cost more than a small kernel, on threads of the engine.
#pragma once

#include "fused_op.h"

namespace fused_op {

using Outputs = std::pair<at::Tensor, at::Tensor>;  // output, sum

// norm_forward of plain tensors of which one needs a gradient: output and sum, which is undefined
// without a residual. What needs more than a kernel's backward is computed in Python, by
// run_backward of fused_op/_routes.py: a gradient that is differentiated itself, and one for which
// no kernel is to be had, or wanted.
Outputs record_norm(const NormTensors& tensors, const NormOptions& options, bool memory_efficient);

// Whether calls are recorded by record_norm(), rather than by the Function of functional.py.
bool records_in_cpp();
void record_in_cpp(bool value);

// The blocks of fused_op.disabled() that are open, in which backward runs no kernel.
void open_disabled_block();
void close_disabled_block();
bool is_disabled();

}  // namespace fused_op
