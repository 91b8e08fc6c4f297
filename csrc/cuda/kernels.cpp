#include "cuda/kernels.h"

#include <cuda_runtime_api.h>
#include <pthread.h>

#include <mutex>
#include <new>

#include "cuda/driver.h"

namespace fused_op::cuda {

constinit std::atomic<const KernelEntry*> kernel_buckets[kKernelBuckets] = {};
constinit std::atomic<int> kernel_count{0};

namespace {

// Held at a miss while the kernel is found, loaded and added to the table.
std::mutex miss_mutex;
// A child process does not have the thread that may have held the mutex at the fork. Whatever that
// thread was about to add is missing; the table has no other state.
[[maybe_unused]] const int fork_handler_status =
    pthread_atfork(nullptr, nullptr, [] { new (&miss_mutex) std::mutex; });

// During its lifetime, this thread may do what a graph capture in progress, on any thread, forbids.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& driver) : driver_(driver) {
    driver_.exchange_capture_mode(&mode_);
  }
  ~RelaxedCapture() { driver_.exchange_capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Driver& driver_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;  // then the previous mode
};

CUkernel handle_of(const Kernel& kernel) {
  return static_cast<CUkernel>(const_cast<void*>(kernel.function()));
}

CUdevice handle_of(const Driver& driver, const DeviceInfo& device) {
  CUdevice handle = 0;
  driver.device(&handle, device.index);
  return handle;
}

struct Failure {
  std::string problem;  // empty: none
  bool is_lasting = true;
};

Failure failure(const Driver& driver, const char* function, CUresult result) {
  if (result == CUDA_SUCCESS) {
    return {};
  }
  const char* name = nullptr;
  driver.error_name(result, &name);
  // PyTorch's cache may hold all memory now, and less at another call.
  return {std::string(function) + " failed: " + (name == nullptr ? "unknown error" : name),
          result != CUDA_ERROR_OUT_OF_MEMORY};
}

// The runtime makes a device's context current at a thread's first call that needs one. This call
// may come earlier. The context is retained for good, as the runtime does.
CUresult ensure_context(const Driver& driver, const DeviceInfo& device) {
  CUcontext context = nullptr;
  if (const CUresult result = driver.context(&context); result != CUDA_SUCCESS || context) {
    return result;
  }
  if (const CUresult result = driver.retain_primary_context(&context, handle_of(driver, device))) {
    return result;
  }
  return driver.set_context(context);
}

// Loads the code on the device, as the first launch would otherwise do.
Failure put_on(const Driver& driver, CUkernel kernel, const DeviceInfo& device) {
  if (const CUresult result = ensure_context(driver, device)) {
    return failure(driver, "making a context current", result);
  }
  CUfunction function = nullptr;
  return failure(driver, "cuKernelGetFunction", driver.kernel_function(&function, kernel));
}

Kernel::Facts facts_of(const Driver& driver, CUkernel kernel, const DeviceInfo& device) {
  const auto get = [&](CUfunction_attribute attribute) {
    int value = 0;
    driver.attribute(&value, attribute, kernel, handle_of(driver, device));
    return value;
  };
  return {get(CU_FUNC_ATTRIBUTE_NUM_REGS), get(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES),
          get(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)};
}

// Sets an attribute of a kernel, once on each device. False if the device refuses it.
bool set_once(OnceOnDevice& once, const Kernel& kernel, CUfunction_attribute attribute, int value,
              const DeviceInfo& device) {
  const Driver& driver = cuda_driver();
  if (!once.done(device) && driver.set_attribute(attribute, value, handle_of(kernel),
                                                 handle_of(driver, device)) == CUDA_SUCCESS) {
    once.set(device);
  }
  return once.done(device);
}

// Loads a kernel of the core table. Sets `kernel`, or returns the problem: the extension may have
// been compiled for other GPUs.
Failure load_built_in(const Driver& driver, const void* built_in, const DeviceInfo& device,
                      const Kernel*& kernel) {
  const RelaxedCapture relaxed(driver);
  cudaKernel_t handle = nullptr;
  if (const cudaError_t status = cudaGetKernel(&handle, built_in)) {
    cudaGetLastError();  // clears the error
    return {std::string("cudaGetKernel failed: ") + cudaGetErrorName(status)};
  }
  const auto as_driver = reinterpret_cast<CUkernel>(handle);
  Failure failed = put_on(driver, as_driver, device);
  if (failed.problem.empty()) {
    kernel = new Kernel(handle, Origin::kCore, facts_of(driver, as_driver, device));
    kernel->set_on(device);
  }
  return failed;
}

// Sets `kernel`, or returns the problem.
Failure load(const Driver& driver, const FoundImage& found, const DeviceInfo& device,
             const Kernel*& kernel) {
  const RelaxedCapture relaxed(driver);
  // PTX needs the terminating zero, which std::string has. The driver copies the code.
  CUlibrary library = nullptr;
  if (const CUresult result = driver.load_library(&library, found.image.code.c_str(), nullptr,
                                                  nullptr, 0, nullptr, nullptr, 0)) {
    return failure(driver, "cuLibraryLoadData", result);
  }
  CUkernel handle = nullptr;
  Failure failed = failure(driver, "cuLibraryGetKernel",
                           driver.kernel(&handle, library, found.image.symbol.c_str()));
  if (failed.problem.empty()) {
    failed = put_on(driver, handle, device);
  }
  if (!failed.problem.empty()) {
    driver.unload_library(library);
    return failed;
  }
  kernel = new Kernel(handle, found.origin, facts_of(driver, handle, device));
  kernel->set_on(device);
  return {};
}

Failure find_and_load(const KernelSource& source, const DeviceInfo& device, const Kernel*& kernel) {
  const Driver& driver = cuda_driver();
  if (!driver.why_not.empty()) {
    return {driver.why_not};
  }
  if (source.built_in != nullptr) {
    Failure failed = load_built_in(driver, source.built_in, device, kernel);
    if (failed.problem.empty() || !failed.is_lasting) {
      return failed;
    }
  }
  try {
    const FoundImage found = find_image(source, device.arch);
    Failure failed = load(driver, found, device, kernel);
    if (failed.problem.empty() || !failed.is_lasting || found.origin != Origin::kPackage ||
        jit_mode() == Jit::kOff) {
      return failed;
    }
    // The package's code does not suit this driver, as with PTX of a later compiler.
    return load(driver, read_cache_or_compile(source, device.arch), device, kernel);
  } catch (const CompileError& error) {
    return {error.what()};
  }
}

// Needs miss_mutex. Returns null, with the reason in `problem`, if there is nothing to remember.
const KernelEntry* add_entry(const KernelKey& key, const DeviceInfo& device,
                             const std::function<KernelSource()>& source, std::string& problem) {
  const Kernel* kernel = nullptr;
  const Failure failed = find_and_load(source(), device, kernel);
  if (!failed.is_lasting) {
    problem = failed.problem;
    return nullptr;
  }
  std::atomic<const KernelEntry*>& bucket = kernel_buckets[bucket_of(key, device.arch)];
  const auto* const entry =
      new KernelEntry{key, device.arch, kernel, failed.problem, bucket.load()};
  bucket.store(entry, std::memory_order_release);
  if (kernel != nullptr && kernel->origin() != Origin::kCore) {
    kernel_count.fetch_add(1, std::memory_order_relaxed);
  }
  return entry;
}

// Needs miss_mutex.
const Kernel* find_locked(const KernelKey& key, const DeviceInfo& device,
                          const std::function<KernelSource()>& source, std::string& problem) {
  const KernelEntry* entry = look_up(key, device.arch);
  if (entry == nullptr) {
    entry = add_entry(key, device, source, problem);
  }
  if (entry == nullptr || entry->kernel == nullptr) {
    problem = entry == nullptr ? problem : entry->problem;
    return nullptr;
  }
  const Kernel& kernel = *entry->kernel;
  if (!kernel.is_on(device)) {  // loaded for another device of this architecture
    const Driver& driver = cuda_driver();
    const RelaxedCapture relaxed(driver);
    problem = put_on(driver, handle_of(kernel), device).problem;
    if (!problem.empty()) {
      return nullptr;
    }
    kernel.set_on(device);
  }
  return &kernel;
}

thread_local std::string last_problem;

}  // namespace

const std::string& why_no_kernel() { return last_problem; }

const Kernel* find_missing_kernel(const KernelKey& key, const DeviceInfo& device,
                                  const std::function<KernelSource()>& source) {
  jit_mode();  // throws for an invalid value
  const KernelEntry* const entry = look_up(key, device.arch);
  if (entry != nullptr && entry->kernel == nullptr) {
    last_problem = entry->problem;
  } else {
    const std::lock_guard<std::mutex> lock(miss_mutex);
    if (const Kernel* const kernel = find_locked(key, device, source, last_problem)) {
      return kernel;
    }
  }
  return nullptr;
}

bool Kernel::opt_in_to_shared(const DeviceInfo& device) const {
  return set_once(shared_, *this, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                  device.shared_bytes - facts_.shared_bytes, device);
}

bool Kernel::allow_large_clusters(const DeviceInfo& device) const {
  return set_once(large_clusters_, *this, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1,
                  device);
}

int Kernel::active_clusters(int threads, int dynamic_bytes, int cluster,
                            const DeviceInfo& device) const {
  if (cluster < 1 || cluster > kMaxCluster) {
    return 0;
  }
  std::atomic<std::int16_t>& known = active_clusters_[device.index][cluster];
  if (const int more = known.load(std::memory_order_relaxed); more > 0) {
    return more - 1;
  }
  CUlaunchAttribute size{};
  size.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  size.value.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  CUlaunchConfig config{};
  config.gridDimX = static_cast<unsigned>(cluster);
  config.blockDimX = static_cast<unsigned>(threads);
  config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = static_cast<unsigned>(dynamic_bytes);
  config.attrs = &size;
  config.numAttrs = 1;
  int count = 0;
  const auto function = reinterpret_cast<CUfunction>(handle_of(*this));
  if (cuda_driver().active_clusters(&count, function, &config) != CUDA_SUCCESS) {
    return 0;
  }
  known.store(static_cast<std::int16_t>(count + 1), std::memory_order_relaxed);
  return count;
}

}  // namespace fused_op::cuda
