// Programmatic dependent launch (sm_90): the CTAs of a kernel are placed while those of the kernel
// before it in the stream still run, and wait there until all it wrote is there. What a launch
// costs between two kernels is hidden. H200, bf16, forward, us of one call after the other without
// and with it: 1.6 1.1 at 1x1024, 2.4 1.7 at 64x1024, 11.9 11.0 at 8192x1024. Torch-free.
#pragma once

#ifndef __CUDACC_RTC__
#include <cuda_runtime_api.h>

#include "cuda/launch.h"
#endif

namespace fused_op::cuda {

// Every kernel calls it before it reads global memory, since the kernel before wrote what it reads,
// and before it writes, since that may still read what it overwrites. In each grid some thread
// calls it, so that the end of a kernel is the end of all before it.
__device__ __forceinline__ void await_kernels_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::
                   :);  // the next kernel may be placed, and waits
#endif
}

// The one thing a kernel may do before that: ask for what it will read, in its first wave of CTAs
// (to be evicted last: see evict_last).
// It comes into the L2 cache, to which all write, and so nothing old is read later. H200, bf16,
// us of one call after the other without and with it: forward 1.6 1.2 at 64x1024, 4.8 4.3 at
// 4096x768, 11.0 10.1 at 8192x1024; backward 2.2 1.9 at 64x1024. Not for what all CTAs read: a
// line is asked for once for each of them, 4.8 19.4 at 4096x768 with weight and bias.
constexpr unsigned kPrefetchingCtas = 2048;
__device__ __forceinline__ void prefetch(const void* place) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(place));
#endif
}
// A lane's vectors of a row, `step` elements apart.
template <int kVectors, typename T>
__device__ __forceinline__ void prefetch_row(const T* row, int col, int step, int width) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (col + i * step < width) {
      prefetch(row + col + i * step);
    }
  }
}

#ifndef __CUDACC_RTC__
struct LaunchShape {
  dim3 grid;
  dim3 block;
  std::size_t shared_bytes = 0;
  unsigned cluster = 0;  // CTAs; 0: no clusters
};

// A stream and its device.
struct Queue {
  const DeviceInfo& device;
  cudaStream_t stream;

  // kernel<<<shape.grid, shape.block, shape.shared_bytes, stream>>>(args...) with that. Errors are
  // those of cudaGetLastError.
  template <typename... Params, typename... Args>
  void launch(void (*kernel)(Params...), const LaunchShape& shape, const Args&... args) const {
    with_config(shape, [&](const cudaLaunchConfig_t& config) {
      cudaLaunchKernelEx(&config, kernel, args...);
    });
  }
  // The same of a kernel with clusters. False, and no error, where the part of the GPU that this
  // context has (a green context, a MIG slice) has no place for one of that size.
  template <typename... Params, typename... Args>
  bool launch_clusters(void (*kernel)(Params...), const LaunchShape& shape,
                       const Args&... args) const {
    cudaError_t status = cudaSuccess;
    with_config(shape, [&](const cudaLaunchConfig_t& config) {
      status = cudaLaunchKernelEx(&config, kernel, args...);
    });
    if (status != cudaErrorInvalidClusterSize) {
      return true;
    }
    cudaGetLastError();  // takes the error back
    return false;
  }
  // How many clusters of that shape the GPU runs at once.
  template <typename Kernel>
  int active_clusters(Kernel* kernel, const LaunchShape& shape) const {
    int count = 0;
    with_config(shape, [&](const cudaLaunchConfig_t& config) {
      cudaOccupancyMaxActiveClusters(&count, kernel, &config);
    });
    return count;
  }

 private:
  template <typename Function>
  void with_config(const LaunchShape& shape, Function&& function) const {
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {shape.cluster, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = shape.grid;
    config.blockDim = shape.block;
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = !device.sm_90 ? 0 : shape.cluster > 0 ? 2 : 1;
    function(config);
  }
};
#endif

}  // namespace fused_op::cuda
