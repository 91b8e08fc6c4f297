// The CUDA backend as the binding sees it. Pointers are those of the current device; sizes are at
// least 1, and smem_bytes at most smem_limit. The caller sets the device and checks what comes
// back.
#pragma once

#include <cuda_runtime_api.h>

#include "op.h"

namespace convrnn::cuda {

// Shared memory that backward needs, the larger half: what runs forward then has a gradient, too.
std::int64_t smem_bytes(DType dtype, const Sizes& sizes);
// What a CTA of the current device can have of it.
std::int64_t smem_limit();

cudaError_t forward(const ForwardArgs& args, cudaStream_t stream);
cudaError_t backward(const BackwardArgs& args, cudaStream_t stream);

}  // namespace convrnn::cuda
