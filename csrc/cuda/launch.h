// Between fused_op_kernel.cu (dtypes) and launch_*.cu (everything below a dtype pair): one launcher
// per pair of element and parameter type, instantiated in its own file so that they build in
// parallel and rebuild alone.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstddef>

#include "core/norm_args.h"
#include "cuda/device_info.h"

namespace fused_op::cuda {

const DeviceInfo& device_info();  // of the current device; read once per process

// The type of parameters whose dtype is known at run time only, and with it that of every other
// tensor: T is what rows are held as.
template <typename A>
struct AnyParameter {};

template <typename T, typename W>
cudaError_t launch_forward(const NormForwardArgs& args, cudaStream_t stream);
template <typename T, typename W>
std::size_t backward_workspace(const NormBackwardArgs& args);
template <typename T, typename W>
cudaError_t launch_backward(const NormBackwardArgs& args, cudaStream_t stream);

}  // namespace fused_op::cuda
