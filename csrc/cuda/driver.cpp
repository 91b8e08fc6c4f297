#include "cuda/driver.h"

#include <dlfcn.h>

#include <atomic>
#include <type_traits>

namespace fused_op::cuda {
namespace {

void load(Driver& driver) {
  void* const library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) {
    driver.why_not = std::string("the CUDA driver cannot be loaded: ") + dlerror();
    return;
  }
  const auto get = [&](const char* name, auto& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) {
      driver.why_not = std::string("the CUDA driver is too old: it has no ") + name;
    }
  };
  get("cuCtxGetCurrent", driver.context);
  get("cuCtxSetCurrent", driver.set_context);
  get("cuDeviceGet", driver.device);
  get("cuDevicePrimaryCtxRetain", driver.retain_primary_context);
  get("cuGetErrorName", driver.error_name);
  get("cuThreadExchangeStreamCaptureMode", driver.exchange_capture_mode);
  get("cuLibraryLoadData", driver.load_library);
  get("cuLibraryUnload", driver.unload_library);
  get("cuLibraryGetKernel", driver.kernel);
  get("cuKernelGetFunction", driver.kernel_function);
  get("cuKernelGetAttribute", driver.attribute);
  get("cuKernelSetAttribute", driver.set_attribute);
  get("cuOccupancyMaxActiveClusters", driver.active_clusters);
}

}  // namespace

const Driver& cuda_driver() {
  // Not a static local: a child forked while another thread initialises one would wait forever. Two
  // threads may both load the driver, with the same result.
  static constinit std::atomic<const Driver*> loaded{nullptr};
  const Driver* known = loaded.load(std::memory_order_acquire);
  if (known == nullptr) {
    auto* const driver = new Driver{};
    load(*driver);
    known = driver;
    loaded.store(known, std::memory_order_release);
  }
  return *known;
}

}  // namespace fused_op::cuda
