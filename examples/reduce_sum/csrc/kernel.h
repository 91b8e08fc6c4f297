// The CUDA backend as the binding sees it. Pointers are those of the current device, and the
// input's is a multiple of 16 bytes; rows and cols are at least 1. The caller sets the device and
// checks what comes back.
#pragma once

#include <cuda_runtime_api.h>

#include "op.h"

namespace reduce_sum::cuda {

cudaError_t sum_parts(const SumArgs& args, cudaStream_t stream);

}  // namespace reduce_sum::cuda
