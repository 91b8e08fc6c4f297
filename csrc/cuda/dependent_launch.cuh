// Programmatic dependent launch (sm_90): the CTAs of a kernel are placed while those of the kernel
// before it in the stream still run, and wait there until all it wrote is there. What a launch
// costs between two kernels is hidden. H200, bf16, forward, us of one call after the other without
// and with it: 1.6 1.1 at 1x1024, 2.4 1.7 at 64x1024, 11.9 11.0 at 8192x1024. Torch-free.
#pragma once

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

}  // namespace fused_op::cuda
