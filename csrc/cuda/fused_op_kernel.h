// The CUDA backend's door: raw pointers and a stream in, an error code out. Torch-free, so that
// plain nvcc compiles everything behind it. The caller has set the device; nothing here
// synchronises, allocates or sets it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "core/norm_args.h"

namespace fused_op::cuda {

// rows > 0 and cols > 0. Pointers are at least element-aligned.
cudaError_t norm_forward(const NormForwardArgs& args, cudaStream_t stream);

// Bytes of scratch that norm_backward needs for these args on the current device; may be 0.
// args.workspace is not read.
std::size_t norm_backward_workspace(const NormBackwardArgs& args);
cudaError_t norm_backward(const NormBackwardArgs& args, cudaStream_t stream);

}  // namespace fused_op::cuda
