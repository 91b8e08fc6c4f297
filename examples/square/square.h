// The CUDA half as square.cpp sees it. Torch-free.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

enum class DType { kFloat16, kBFloat16, kFloat32, kFloat64 };

// y = x², and dx = 2 · x · dy, of `count` elements, at least 1.
cudaError_t square_forward_cuda(DType dtype, std::int64_t count, const void* x, void* y,
                                cudaStream_t stream);
cudaError_t square_backward_cuda(DType dtype, std::int64_t count, const void* x, const void* dy,
                                 void* dx, cudaStream_t stream);
