// The gradient of calls with plain tensors, as an autograd node in C++. On the engine's threads its
// backward runs without Python, which would cost more than a small kernel.
#pragma once

#include "fused_op.h"

namespace fused_op {

using Outputs = std::pair<at::Tensor, at::Tensor>;  // output, sum

// norm_forward for plain tensors, at least one of which needs a gradient. Returns output and sum;
// sum is undefined without a residual. run_backward in fused_op/_routes.py computes, in Python,
// whatever needs more than the backward kernel: a gradient that is itself differentiated, and one
// whose kernel is unavailable or not wanted.
Outputs record_norm(const NormTensors& tensors, const NormOptions& options, bool memory_efficient);

// Whether record_norm() records calls, rather than the Function of functional.py.
bool records_in_cpp();
void record_in_cpp(bool value);

// Counts the open blocks of fused_op.disabled(). Inside one, backward runs no kernel.
void open_disabled_block();
void close_disabled_block();
bool is_disabled();

}  // namespace fused_op
