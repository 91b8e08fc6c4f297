// Programmatic dependent launch (sm_90): the CTAs of a kernel are placed while those of the
// previous kernel in the stream still run, and wait until everything that kernel wrote is visible.
// This hides the cost of a launch between two kernels. H200, bf16, forward, us a call back to back
// without and with it: 1.6 1.1 at 1x1024, 2.4 1.7 at 64x1024, 11.9 11.0 at 8192x1024. Torch-free.
#pragma once

namespace fused_op::cuda {

// Every kernel calls this before it reads global memory, because the previous kernel may have
// written it, and before it writes, because the previous kernel may still read it. In each grid
// some thread calls it, so the end of a kernel implies the end of all kernels before it.
__device__ __forceinline__ void await_kernels_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" :::);  // the next kernel may start, and waits
#endif
}

// What a kernel may do before that wait: its first wave of CTAs may prefetch what it will read, to
// be evicted last (see evict_last()). The data goes to the L2 cache, through which all writes go as
// well, so nothing stale is read later. H200, bf16, us a call back to back without and with it:
// forward 1.6 1.2 at 64x1024, 4.8 4.3 at 4096x768, 11.0 10.1 at 8192x1024; backward 2.2 1.9 at
// 64x1024. This is not for what all CTAs read, because each of them would prefetch the same lines:
// 4.8 19.4 at 4096x768 with weight and bias.
constexpr unsigned kPrefetchingCtas = 2048;
__device__ __forceinline__ void prefetch(const void* place) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(place));
#endif
}

}  // namespace fused_op::cuda
