// The border between tensors and kernels: picks CPU or CUDA by device. norm.cpp calls it; behind it
// are only plain structs and raw pointers (core/norm_args.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

#include "core/norm_args.h"
#include "core/post_add_pre.h"
#include "core/quantize.h"
#include "core/variant.h"

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
// current stream of `device`. With a variant, `args` are the base of its own.
void norm_forward(const NormForwardArgs& args, at::Device device, const Variant* variant = nullptr);
// And its output in 8 bits; the output itself may be null.
void norm_quantized(const NormForwardArgs& args, const Quantization& quantization,
                    at::Device device);
// Allocates args.workspace.
void norm_backward(NormBackwardArgs& args, at::Device device, const Variant* variant = nullptr);

// Both norms in one pass over the rows. False, and nothing is done, where no kernel takes them so:
// one after the other they have the same bits.
bool post_add_pre_forward(PostAddPreForwardArgs& args, at::Device device);

// The instructions that the CPU's loops use: "default", "avx2" or "avx512".
const char* cpu_level();

}  // namespace fused_op::backend
