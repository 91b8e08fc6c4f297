// The kernels that decide at run time, of rows that are held as double. Torch-free:
// nvcc -std=c++20 -O3 -fmad=false -Icsrc -arch=sm_90 -Xptxas -v -c csrc/cuda/launch_flexible_f64.cu
#include "cuda/launch_backward.cuh"
#include "cuda/launch_forward.cuh"

namespace fused_op::cuda {

template cudaError_t launch_forward<double, AnyParameter<double>>(const NormForwardArgs&,
                                                                  cudaStream_t);
template std::size_t backward_workspace<double, AnyParameter<double>>(const NormBackwardArgs&);
template cudaError_t launch_backward<double, AnyParameter<double>>(const NormBackwardArgs&,
                                                                   cudaStream_t);

}  // namespace fused_op::cuda
