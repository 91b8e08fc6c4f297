// The border between tensors and kernels: picks CPU or CUDA by device. norm.cpp and the variants
// call it. Behind it there are only plain structs and raw pointers (core/norm_args.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

#include "core/channels_first.h"
#include "core/group_norm.h"
#include "core/norm_args.h"
#include "core/post_add_pre.h"
#include "core/quantize.h"
#include "core/variant.h"

namespace fused_op::backend {

// Uninitialised and contiguous, straight from the device's caching allocator. at::empty goes
// through the dispatcher first, which costs a small call more than its kernel does.
at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device);
// Undefined if not wanted.
inline at::Tensor empty_if(bool is_wanted, at::IntArrayRef sizes, at::ScalarType dtype,
                           at::Device device) {
  return is_wanted ? empty(sizes, dtype, device) : at::Tensor();
}

// Seed and offset for one dropout mask, [2] i64, drawn from the device's default generator. The
// numbers are the same wherever they are stored. They are stored on the CPU, which costs no launch,
// unless `on_device` is set or a CUDA graph is being captured: a value on the CPU would be the same
// at each replay.
at::Tensor dropout_state(at::Device device, bool on_device);

// All pointers of `args` are on `device`; rows > 0 and cols > 0. On CUDA, the work is queued on the
// current stream of `device`. With a variant, `args` is the base of the variant's own arguments.
void norm_forward(const NormForwardArgs& args, at::Device device, const Variant* variant = nullptr);
// The same with its output in 8 bits. The unquantised output may be null.
void norm_quantized(const NormForwardArgs& args, const Quantization& quantization,
                    at::Device device);
// Allocates args.workspace.
void norm_backward(NormBackwardArgs& args, at::Device device, const Variant* variant = nullptr);

// Both norms in one pass over the rows. Returns false, having done nothing, if no kernel takes them
// together. Run one after the other, they give the same bits.
bool post_add_pre_forward(PostAddPreForwardArgs& args, at::Device device);

// Norms over the channels of images.
void channels_first_forward(const ChannelsFirstForwardArgs& args, at::Device device);
// Allocates args.workspace.
void channels_first_backward(ChannelsFirstBackwardArgs& args, at::Device device);

// The group norm of images.
// Whether `args` may have args.nhwc.
bool reads_nhwc(const GroupNormArgs& args, at::Device device);
// Both allocate args.workspace.
void group_norm_forward(GroupNormForwardArgs& args, at::Device device);
void group_norm_backward(GroupNormBackwardArgs& args, at::Device device);

// The instruction set of the CPU's loops: "default", "avx2" or "avx512".
const char* cpu_level();

}  // namespace fused_op::backend
