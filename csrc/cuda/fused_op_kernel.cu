// The doors of the CUDA backend: dtypes to the launchers of launch_*.cu, and what is known of the
// device. Torch-free:
// nvcc -std=c++20 -O3 -fmad=false -Icsrc -arch=sm_90 -c csrc/cuda/fused_op_kernel.cu
#include <algorithm>
#include <array>
#include <mutex>

#include "core/dispatch.h"
#include "cuda/first_use.h"
#include "cuda/fused_op_kernel.h"
#include "cuda/launch.h"

namespace fused_op::cuda {
namespace {

struct CudaTypes {
  using Float16 = __half;
  using BFloat16 = __nv_bfloat16;
};

DeviceInfo read_device_info(int device) {
  DeviceInfo info{};
  info.index = device;
  int major = 0;
  int minor = 0;
  cudaDeviceGetAttribute(&info.multiprocessors, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&info.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  info.sm_90 = major >= 9;
  info.arch = 10 * major + minor;
  info.max_cluster = major == 9 || major == 10 ? 16 : major > 10 ? 8 : 0;
  return info;
}

bool has_kernels(const NormForwardArgs& args) { return !is_flexible(args); }
bool has_kernels(const NormBackwardArgs& args) {
  return !is_flexible(args) || is_vector_dropout(args);
}

// Calls function with the types of rows and parameters.
template <typename Args, typename Function>
auto with_types(const Args& args, Function&& function) {
  if (has_kernels(args)) {
    return with_dtypes<CudaTypes>(args.dtype, args.param_dtype, function);
  }
  return args.dtype == DType::kFloat64
             ? function.template operator()<double, AnyParameter<double>>()
             : function.template operator()<float, AnyParameter<float>>();
}

}  // namespace

const DeviceInfo& device_info() {
  static std::array<DeviceInfo, kMaxDevices> known;
  static std::array<std::once_flag, kMaxDevices> once;
  int device = 0;
  cudaGetDevice(&device);
  std::call_once(once[device], [&] { known[device] = read_device_info(device); });
  return known[device];
}

cudaError_t norm_forward(const NormForwardArgs& args, cudaStream_t stream) {
  if (launch_first_use(args, device_info(), stream)) {
    return cudaGetLastError();
  }
  return with_types(args,
                    [&]<typename T, typename W>() { return launch_forward<T, W>(args, stream); });
}

std::size_t norm_backward_workspace(const NormBackwardArgs& args) {
  // The larger of two: at the launch there may be no kernel for the first.
  const std::size_t first_use = first_use_workspace(args, device_info());
  return std::max(first_use, with_types(args, [&]<typename T, typename W>() {
                    return backward_workspace<T, W>(args);
                  }));
}

cudaError_t norm_backward(const NormBackwardArgs& args, cudaStream_t stream) {
  if (launch_first_use(args, device_info(), stream)) {
    return cudaGetLastError();
  }
  return with_types(args,
                    [&]<typename T, typename W>() { return launch_backward<T, W>(args, stream); });
}

}  // namespace fused_op::cuda
