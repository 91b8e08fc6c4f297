// The calls whose kernels are compiled at first use: all but those of the core table. Torch-free.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "core/norm_args.h"
#include "cuda/device_info.h"

namespace fused_op::cuda {

// Whether the kernel was there, or could be compiled, and has been launched; errors of the launch
// are those of cudaGetLastError. False for a call of the core table, and where FUSED_OP_JIT is 0 or
// there is no compiler.
bool launch_first_use(const NormForwardArgs& args, const DeviceInfo& device, cudaStream_t stream);

// The same of backward, with first_use_workspace() bytes at args.workspace.
bool launch_first_use(const NormBackwardArgs& args, const DeviceInfo& device, cudaStream_t stream);
std::size_t first_use_workspace(const NormBackwardArgs& args, const DeviceInfo& device);

// Why a kernel could not be had, so that a slower one took a call of this thread, since this was
// last asked; null if none was missing, or FUSED_OP_JIT=0 wants it so.
const std::string* take_missing_kernel();

}  // namespace fused_op::cuda
