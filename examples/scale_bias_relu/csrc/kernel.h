// The CUDA backend as the binding sees it. Pointers are those of the current device, and multiples
// of 16 bytes; rows and cols are at least 1. The caller sets the device and checks what comes back.
#pragma once

#include <cuda_runtime_api.h>

#include "op.h"

namespace scale_bias_relu::cuda {

cudaError_t forward(const ForwardArgs& args, cudaStream_t stream);

// How many rows of partial sums backward needs, a function of the shape and the dtype alone.
std::int64_t backward_parts(DType dtype, std::int64_t rows, std::int64_t cols);
cudaError_t backward(const BackwardArgs& args, cudaStream_t stream);

}  // namespace scale_bias_relu::cuda
