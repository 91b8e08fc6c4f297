// The kernels of one dtype pair: elements, then parameters. Torch-free:
// nvcc -std=c++20 -O3 -fmad=false -Icsrc -arch=sm_90 -Xptxas -v -c csrc/cuda/launch_bf16_f32.cu
#include "cuda/launch_backward.cuh"
#include "cuda/launch_forward.cuh"

namespace fused_op::cuda {

template cudaError_t launch_forward<__nv_bfloat16, float>(const NormForwardArgs&, cudaStream_t);
template std::size_t backward_workspace<__nv_bfloat16, float>(const NormBackwardArgs&);
template cudaError_t launch_backward<__nv_bfloat16, float>(const NormBackwardArgs&, cudaStream_t);

}  // namespace fused_op::cuda
