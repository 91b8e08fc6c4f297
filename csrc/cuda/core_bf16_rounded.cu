// The kernels of the core table for bf16 rows and parameters whose x̂ is rounded before the weight,
// as in Llama; RMSNorm alone. Torch-free:
// nvcc -std=c++20 -O3 -fmad=false -Icsrc -arch=sm_90 -Xptxas -v -c csrc/cuda/core_bf16_rounded.cu
#include "cuda/core_backward.cuh"
#include "cuda/core_forward.cuh"

namespace fused_op::cuda {

template const void* core_forward_of<BFloat16, BFloat16, true>(NormKind norm, bool adds, int tile);
template const void* core_backward_of<BFloat16, BFloat16, true>(NormKind norm, bool adds, int tile);

}  // namespace fused_op::cuda
