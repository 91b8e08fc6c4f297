// The kernels of the core table for rows and parameters of these types. Torch-free:
// nvcc -std=c++20 -O3 -fmad=false -Icsrc -arch=sm_90 -Xptxas -v -c csrc/cuda/core_f16_f32.cu
#include "cuda/core_backward.cuh"
#include "cuda/core_forward.cuh"

namespace fused_op::cuda {

template const void* core_forward_of<Float16, float>(NormKind norm, bool adds, int tile);
template const void* core_backward_of<Float16, float>(NormKind norm, bool adds, int tile);

}  // namespace fused_op::cuda
