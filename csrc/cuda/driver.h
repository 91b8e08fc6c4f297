// The functions of the CUDA driver that load kernels. Host code, included only by kernels.cpp.
#pragma once

#include <cuda.h>

#include <string>

namespace fused_op::cuda {

// Found by dlsym: a module linked with libcuda cannot be imported on a machine without a driver.
// The runtime has functions that load a library since CUDA 12.8, the driver since 12.0.
struct Driver {
  decltype(&cuCtxGetCurrent) context;
  decltype(&cuCtxSetCurrent) set_context;
  decltype(&cuDeviceGet) device;
  decltype(&cuDevicePrimaryCtxRetain) retain_primary_context;
  decltype(&cuGetErrorName) error_name;
  decltype(&cuThreadExchangeStreamCaptureMode) exchange_capture_mode;
  decltype(&cuLibraryLoadData) load_library;
  decltype(&cuLibraryUnload) unload_library;
  decltype(&cuLibraryGetKernel) kernel;
  decltype(&cuKernelGetFunction) kernel_function;
  decltype(&cuKernelGetAttribute) attribute;
  decltype(&cuKernelSetAttribute) set_attribute;
  decltype(&cuOccupancyMaxActiveClusters) active_clusters;

  std::string why_not = {};  // a clause; empty if all functions were found
};

// The driver of this process, loaded at the first call. Thread-safe.
const Driver& cuda_driver();

}  // namespace fused_op::cuda
