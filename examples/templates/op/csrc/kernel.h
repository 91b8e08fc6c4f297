// The CUDA backend as the binding sees it. Pointers are those of the current device, and multiples
// of 16 bytes; count is at least 1. The caller sets the device and checks what comes back.
#pragma once

#include <cuda_runtime_api.h>

#include "op.h"

namespace template_op::cuda {

cudaError_t forward(const ForwardArgs& args, cudaStream_t stream);
cudaError_t backward(const BackwardArgs& args, cudaStream_t stream);

}  // namespace template_op::cuda
