// Stands in for libcuda.so.1 in kernel_table.cpp. It counts calls, and fails on request. The code
// of a library is "good", "not for this driver" or "too large"; its kernel is its own address.
#include <cuda.h>

#include <cstring>

extern "C" {

int fake_loads = 0;  // libraries loaded
int fake_unloads = 0;
int fake_functions = 0;           // kernels put on a device
int fake_attributes = 0;          // attributes set
int fake_questions = 0;           // questions about active clusters
int fake_retained = 0;            // primary contexts retained
int fake_last_attribute[3] = {};  // attribute, value, device
bool fake_out_of_memory = false;
int fake_forbidden = 0;  // what a graph capture forbids, unless the thread's mode is relaxed
static thread_local CUstreamCaptureMode fake_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
int fake_mode_now() { return fake_mode; }
static thread_local CUcontext current = nullptr;

CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = current;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
  current = context;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  ++fake_retained;
  *context = reinterpret_cast<CUcontext>(static_cast<long>(device) + 1);
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = error == CUDA_ERROR_INVALID_IMAGE   ? "CUDA_ERROR_INVALID_IMAGE"
          : error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
                                              : nullptr;
  return CUDA_SUCCESS;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  const CUstreamCaptureMode before = fake_mode;
  fake_mode = *mode;
  *mode = before;
  return CUDA_SUCCESS;
}

CUresult cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option*, void**, unsigned,
                           CUlibraryOption*, void**, unsigned) {
  fake_forbidden += fake_mode != CU_STREAM_CAPTURE_MODE_RELAXED;
  if (fake_out_of_memory) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  if (std::strcmp(static_cast<const char*>(code), "good") != 0) {
    return CUDA_ERROR_INVALID_IMAGE;
  }
  ++fake_loads;
  *library = reinterpret_cast<CUlibrary>(new int);
  return CUDA_SUCCESS;
}
CUresult cuLibraryUnload(CUlibrary) {
  ++fake_unloads;
  return CUDA_SUCCESS;
}
CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
  *kernel = reinterpret_cast<CUkernel>(library);
  return std::strcmp(name, "symbol") == 0 ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  fake_forbidden += fake_mode != CU_STREAM_CAPTURE_MODE_RELAXED;
  if (current == nullptr) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  ++fake_functions;
  *function = reinterpret_cast<CUfunction>(kernel);
  return CUDA_SUCCESS;
}
CUresult cuKernelGetAttribute(int* value, CUfunction_attribute attribute, CUkernel, CUdevice) {
  *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 64
           : attribute == CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES  ? 8
           : attribute == CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES ? 1000
                                                              : -1;
  return CUDA_SUCCESS;
}
#ifndef OLD_DRIVER
CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel,
                              CUdevice device) {
  ++fake_attributes;
  fake_last_attribute[0] = attribute;
  fake_last_attribute[1] = value;
  fake_last_attribute[2] = device;
  return CUDA_SUCCESS;
}
#endif
CUresult cuOccupancyMaxActiveClusters(int* count, CUfunction, const CUlaunchConfig* config) {
  ++fake_questions;
  const unsigned cluster = config->attrs[0].value.clusterDim.x;
  *count = static_cast<int>(132 / cluster);
  return config->gridDimX % cluster == 0 && config->blockDimX > 0 ? CUDA_SUCCESS
                                                                  : CUDA_ERROR_INVALID_VALUE;
}

}  // extern "C"
