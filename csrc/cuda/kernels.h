// Kernels by key: the table in memory that launches look up, and the loading of kernels from the
// core table and of those that kernel_files.cpp finds. Host code without torch.
//
//   const Kernel* kernel = find_kernel(key, device, [&] { return KernelSource{header, name}; });
//   if (kernel == nullptr || !kernel->allow_shared(bytes, device)) { ... why_no_kernel() ... }
//   cudaLaunchKernelExC(&config, kernel->function(), arguments);
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "core/kernel_error.h"
#include "cuda/compile.h"
#include "cuda/device_info.h"
#include "cuda/kernel_files.h"

namespace fused_op::cuda {

// Everything that distinguishes a kernel from others, packed by the launch.
struct KernelKey {
  std::uint64_t low;
  std::uint64_t high;

  bool operator==(const KernelKey&) const = default;
};

// One bit for each device, set once something has been done there.
class OnceOnDevice {
 public:
  bool done(const DeviceInfo& device) const {
    return (devices_.load(std::memory_order_acquire) >> device.index & 1) != 0;
  }
  void set(const DeviceInfo& device) {
    devices_.fetch_or(std::uint64_t{1} << device.index, std::memory_order_release);
  }

 private:
  static_assert(kMaxDevices <= 64);
  std::atomic<std::uint64_t> devices_{0};
};

// A loaded kernel, for all devices of its architecture. It lives as long as the process. The
// functions that take a device need it to be the current one. Thread-safe.
class Kernel {
 public:
  struct Facts {
    int registers;     // of a thread
    int local_bytes;   // of a thread: its stack and spills
    int shared_bytes;  // of a CTA, without dynamic shared memory
  };
  Kernel(const void* function, Origin origin, const Facts& facts)
      : function_(function), origin_(origin), facts_(facts) {}
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  // A cudaKernel_t, for cudaLaunchKernelExC and other functions of the runtime.
  const void* function() const { return function_; }
  Origin origin() const { return origin_; }
  int registers() const { return facts_.registers; }
  int local_bytes() const { return facts_.local_bytes; }
  int shared_bytes() const { return facts_.shared_bytes; }

  // Called before a launch with that much dynamic shared memory. False if the device does not have
  // it.
  bool allow_shared(int dynamic_bytes, const DeviceInfo& device) const {
    const int bytes = dynamic_bytes + facts_.shared_bytes;
    return bytes <= kSharedBytesOfEveryKernel ||
           (bytes <= device.shared_bytes && (shared_.done(device) || opt_in_to_shared(device)));
  }
  // Called before a launch with clusters of more than 8 CTAs. False if the device does not have
  // them.
  bool allow_large_clusters(const DeviceInfo& device) const;
  // How many clusters the device runs at once, to be called after the two functions above; 0 if
  // none. The driver is asked once for each cluster size. A kernel uses one number of threads with
  // each of them, and numbers of bytes with which an SM has room for as many CTAs.
  int active_clusters(int threads, int dynamic_bytes, int cluster, const DeviceInfo& device) const;

  // For find_kernel(): whether the code is on the device. If not, the first launch would load it,
  // which a graph capture may forbid.
  bool is_on(const DeviceInfo& device) const { return on_.done(device); }
  void set_on(const DeviceInfo& device) const { on_.set(device); }

 private:
  static constexpr int kSharedBytesOfEveryKernel = 48 << 10;
  static constexpr int kMaxCluster = 16;

  bool opt_in_to_shared(const DeviceInfo& device) const;

  const void* function_;
  Origin origin_;
  Facts facts_;
  mutable OnceOnDevice on_;
  mutable OnceOnDevice shared_;
  mutable OnceOnDevice large_clusters_;
  // the count plus one; 0: not asked yet
  mutable std::atomic<std::int16_t> active_clusters_[kMaxDevices][kMaxCluster + 1] = {};
};

// A kernel for one key and architecture. Never changed once it is in the table, and never freed.
struct KernelEntry {
  KernelKey key;
  int arch;
  const Kernel* kernel;  // null: not available
  std::string problem;   // the reason
  const KernelEntry* next;
};

constexpr std::size_t kKernelBuckets = 1024;
extern std::atomic<const KernelEntry*> kernel_buckets[kKernelBuckets];

inline std::size_t bucket_of(const KernelKey& key, int arch) {
  std::uint64_t mixed = key.low ^ static_cast<std::uint64_t>(arch) << 48;
  mixed = (mixed * 0x9e3779b97f4a7c15 ^ key.high) * 0xd6e8feb86659fd93;
  return (mixed ^ mixed >> 32) * 0x9e3779b97f4a7c15 >> 54;
}
static_assert(kKernelBuckets == std::size_t{1} << (64 - 54));

// The entry, or null. Takes no lock and allocates nothing.
inline const KernelEntry* look_up(const KernelKey& key, int arch) {
  const KernelEntry* entry = kernel_buckets[bucket_of(key, arch)].load(std::memory_order_acquire);
  while (entry != nullptr && !(entry->key == key && entry->arch == arch)) {
    entry = entry->next;
  }
  return entry;
}

// The number of loaded kernels, not counting the core table's.
extern std::atomic<int> kernel_count;

// Called by find_kernel if the table does not have the kernel ready for the device.
const Kernel* find_missing_kernel(const KernelKey& key, const DeviceInfo& device,
                                  const std::function<KernelSource()>& source);

#ifdef FUSED_OP_CHECK_KEYS  // by tests: throws if another kernel has had the key
void check_key(const KernelKey& key, const DeviceInfo& device, const std::string& name);
#endif

// The kernel of that key for the current device, which `device` describes; null if it is not
// available. `source` returns a KernelSource and is called only on a miss. A miss takes half a
// second if the kernel has to be compiled, and may happen during a graph capture. Throws
// std::runtime_error if FUSED_OP_JIT has an invalid value.
template <typename Source>
const Kernel* find_kernel(const KernelKey& key, const DeviceInfo& device, Source&& source) {
#ifdef FUSED_OP_CHECK_KEYS
  check_key(key, device, source().name);
#endif
  const KernelEntry* const entry = look_up(key, device.arch);
  if (entry != nullptr && entry->kernel != nullptr && entry->kernel->is_on(device)) [[likely]] {
    return entry->kernel;
  }
  return find_missing_kernel(key, device, std::ref(source));
}

// Why find_kernel last returned null on this thread.
const std::string& why_no_kernel();

}  // namespace fused_op::cuda
