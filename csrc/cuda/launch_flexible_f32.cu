// The kernels that decide at run time, of rows that are held as float. Torch-free:
// nvcc -std=c++20 -O3 -fmad=false -Icsrc -arch=sm_90 -Xptxas -v -c csrc/cuda/launch_flexible_f32.cu
#include "cuda/launch_backward.cuh"
#include "cuda/launch_forward.cuh"

namespace fused_op::cuda {

template cudaError_t launch_forward<float, AnyParameter<float>>(const NormForwardArgs&,
                                                                cudaStream_t);
template std::size_t backward_workspace<float, AnyParameter<float>>(const NormBackwardArgs&);
template cudaError_t launch_backward<float, AnyParameter<float>>(const NormBackwardArgs&,
                                                                 cudaStream_t);

}  // namespace fused_op::cuda
