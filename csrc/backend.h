// The border between tensors and kernels: picks CPU or CUDA by device. norm.cpp calls it; behind it
// are only plain structs and raw pointers (core/norm_args.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

#include "core/norm_args.h"

namespace fused_op::backend {

// Uninitialised and contiguous, straight from the device's caching allocator: at::empty goes
// through the dispatcher first, which costs a small call more than its kernel.
at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device);

// Seed and offset for one dropout mask, [2] i64, drawn from the default generator of the device:
// the same numbers wherever they are put. That is the CPU, which costs no launch, unless they are
// wanted on the device, or a CUDA graph is being captured: a value on the CPU would be the same at
// each replay.
at::Tensor dropout_state(at::Device device, bool on_device);

// All pointers of `args` are on `device`; rows > 0 and cols > 0. On CUDA the work is queued on the
// current stream of `device`.
void norm_forward(const NormForwardArgs& args, at::Device device);
std::size_t norm_backward_workspace(const NormBackwardArgs& args, at::Device device);  // bytes
void norm_backward(const NormBackwardArgs& args, at::Device device);

}  // namespace fused_op::backend
