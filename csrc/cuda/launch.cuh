// What the launchers of forward and backward share. Included by launch_*.cu only; torch-free.
#pragma once

#include <algorithm>
#include <atomic>
#include <initializer_list>
#include <type_traits>

#include "core/norm_args.h"
#include "core/row_source.h"
#include "cuda/cluster_layout.h"
#include "cuda/dependent_launch.cuh"
#include "cuda/launch.h"
#include "cuda/row_tile.h"

namespace fused_op::cuda {

inline bool vector_aligned(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % kVectorBytes == 0;
}

// Whether every row of every argument begins at a multiple of so many bytes.
template <int kBytes, typename T>
bool rows_aligned(std::int64_t cols, std::initializer_list<ConstRows> rows) {
  constexpr int kElements = kBytes / sizeof(T);
  bool aligned = cols % kElements == 0;
  for (const ConstRows& each : rows) {
    aligned = aligned && reinterpret_cast<std::uintptr_t>(each.data) % kBytes == 0 &&
              each.stride % kElements == 0;
  }
  return aligned;
}

// Calls function with VectorAccess where every row of every argument allows it.
template <typename T, typename Function>
auto with_access(std::int64_t cols, std::initializer_list<ConstRows> rows, Function&& function) {
  return rows_aligned<kVectorBytes, T>(cols, rows) ? function.template operator()<VectorAccess>()
                                                   : function.template operator()<ShiftedAccess>();
}

// Whether there are kernels in which a cluster takes several of the longest rows in turn: of rows
// that are copied to shared memory as they lie.
template <typename Source, typename Access>
constexpr bool kClustersTakeTurns =
    std::is_same_v<Source, Plain<typename Source::Element>> && Access::kWholePacks &&
    sizeof(Accumulator<typename Source::Element>) == 4;

// An attribute of one kernel, set at its first launch on each device. A failure shows at the
// launch, and the next one tries again.
class AttributeOnce {
 public:
  template <typename Kernel>
  void set(Kernel* kernel, cudaFuncAttribute attribute, int value, const DeviceInfo& device) {
    const std::uint64_t bit = std::uint64_t{1} << device.index;
    if ((devices_.load(std::memory_order_relaxed) & bit) == 0 &&
        cudaFuncSetAttribute(kernel, attribute, value) == cudaSuccess) {
      devices_.fetch_or(bit, std::memory_order_relaxed);
    }
  }

 private:
  std::atomic<std::uint64_t> devices_{0};  // a bit each
};

// How many clusters of one kernel a device runs at once, asked once for each size of a cluster.
class ActiveClusters {
 public:
  template <typename Kernel>
  int count(const Queue& queue, Kernel* kernel, const LaunchShape& shape) {
    std::atomic<int>& known = known_[queue.device.index][shape.cluster];
    int count = known.load(std::memory_order_relaxed);
    if (count == 0) {
      count = queue.active_clusters(kernel, shape);
      known.store(count, std::memory_order_relaxed);
    }
    return count;
  }

 private:
  std::atomic<int> known_[kMaxDevices][kMaxCluster + 1]{};
};

// A dense argument, as rows.
inline ConstRows dense(const void* data) { return {.data = data}; }

}  // namespace fused_op::cuda
