// The ops of the dispatcher, torch.ops.fused_op: dispatcher.cpp registers norm_forward,
// norm_backward and dropout_state there. These functions call them, for tensors that are not plain
// memory: under torch.compile, in function transforms and modes, in tensor subclasses.
#pragma once

#include <ATen/core/ivalue.h>

#include <vector>

#include "fused_op.h"

namespace fused_op::dispatcher {

// Like the functions of fused_op.h, but an undefined result is a tensor without elements, because
// the results of an op must be real tensors.
ThreeTensors norm_forward(const NormTensors& tensors, const NormOptions& options);
FourTensors norm_backward(const BackwardTensors& tensors, const BackwardOptions& options);
at::Tensor dropout_state(const at::Tensor& like, bool on_device);

// The arguments of those calls, for a profiler that wants them.
std::vector<c10::IValue> arguments(const NormTensors& tensors, const NormOptions& options);
std::vector<c10::IValue> arguments(const BackwardTensors& tensors, const BackwardOptions& options);

}  // namespace fused_op::dispatcher
