// The entry of the CUDA backend: raw pointers and a stream in, an error code out. Torch-free, so
// plain nvcc compiles everything behind it. The caller sets the device. Nothing here synchronises,
// allocates or changes the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <optional>

#include "core/channels_first.h"
#include "core/group_norm.h"
#include "core/norm_args.h"
#include "core/post_add_pre.h"
#include "core/quantize.h"
#include "core/variant.h"

namespace fused_op::cuda {

// rows > 0 and cols > 0. Pointers are at least element-aligned. With a variant, `args` is the base
// of the variant's own arguments.
cudaError_t norm_forward(const NormForwardArgs& args, const Variant* variant, cudaStream_t stream);

// The same with an output in 8 bits. Unless it is quantised in registers, the unquantised output
// has to be in memory, too.
bool quantizes_in_registers(const NormForwardArgs& args);
cudaError_t norm_quantized(const NormForwardArgs& args, const Quantization& to,
                           cudaStream_t stream);

// Two norms in one kernel. Returns nothing, and launches nothing, if no kernel takes the call.
std::optional<cudaError_t> post_add_pre_forward(PostAddPreForwardArgs& args, cudaStream_t stream);

// Norms over channels, and the bytes of scratch that their backward needs.
cudaError_t channels_first_forward(const ChannelsFirstForwardArgs& args, cudaStream_t stream);
std::size_t channels_first_workspace(const ChannelsFirstBackwardArgs& args);
cudaError_t channels_first_backward(const ChannelsFirstBackwardArgs& args, cudaStream_t stream);

// Group norms, likewise. Whether the kernels read and write images whose channels are neighbours.
bool reads_nhwc(const GroupNormArgs& args);
std::size_t group_norm_workspace(const GroupNormForwardArgs& args);
cudaError_t group_norm_forward(const GroupNormForwardArgs& args, cudaStream_t stream);
std::size_t group_norm_workspace(const GroupNormBackwardArgs& args);
cudaError_t group_norm_backward(const GroupNormBackwardArgs& args, cudaStream_t stream);

// Bytes of scratch that norm_backward needs for these args on the current device; may be 0.
// args.workspace is not read.
std::size_t norm_backward_workspace(const NormBackwardArgs& args, const Variant* variant);
cudaError_t norm_backward(const NormBackwardArgs& args, const Variant* variant,
                          cudaStream_t stream);

}  // namespace fused_op::cuda
