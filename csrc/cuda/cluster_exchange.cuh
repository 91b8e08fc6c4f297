// How the warps of a cluster (sm_90) exchange the parts of a row: each writes its part into the
// shared memory of every CTA, and with it counts down a barrier there, which the CTA's own threads
// wait at. No barrier of the whole cluster is in the way, which costs a fence of all memory
// (MEMBAR.ALL.GPU): H200, bf16, us, with one and so, 5.1 3.5 at 8x65536, 9.0 5.9 at 1x262144. PTX
// ISA: mbarrier, st.async. Torch-free.
#pragma once

#include "cuda/row_access.cuh"
#include "cuda/row_sum.cuh"

namespace fused_op::cuda {

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ unsigned cluster_size() {
  unsigned size;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
  return size;
}
__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ unsigned cluster_id() {
  unsigned id;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(id));
  return id;
}

template <typename A>
struct ClusterExchange {
  WarpMoments<A>* parts;    // in shared memory, at the same place in every CTA
  std::uint64_t* arrivals;  // an mbarrier, likewise
  int ctas;

  // All threads of the cluster, with the number of parts of the row. Between begin() and ready()
  // there may be work that needs no other CTA: they may not run yet.
  __device__ __forceinline__ void begin(int count) const {
    if (threadIdx.x == 0) {
      const std::uint32_t at = local(arrivals);
      const std::uint32_t bytes = count * static_cast<int>(sizeof(WarpMoments<A>));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes)
                   : "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }
  __device__ __forceinline__ void ready() const {
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
  }

  // All lanes of a warp.
  __device__ __forceinline__ void send(int part, const WarpMoments<A>& mine) const {
    const int lane = static_cast<int>(threadIdx.x % kWarpSize);
    if (lane < ctas) {
      const std::uint32_t to = of_cta(local(parts + part), lane);
      const std::uint32_t signal = of_cta(local(arrivals), lane);
      std::uint32_t words[sizeof(mine) / 4];
      memcpy(words, &mine, sizeof(mine));
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(mine) / 4); i += 4) {
        asm volatile(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
            "[%5];" ::"r"(to + i * 4),
            "r"(words[i]), "r"(words[i + 1]), "r"(words[i + 2]), "r"(words[i + 3]), "r"(signal)
            : "memory");
      }
    }
  }
  // Until all parts of the row are here.
  __device__ __forceinline__ void await() const {
    asm volatile(
        "{\n"
        "  .reg .pred done;\n"
        "again:\n"
        "  mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
        "  @!done bra again;\n"
        "}" ::"r"(local(arrivals))
        : "memory");
  }

  // Another exchange, for the few rows that need one: slower, and as often as wanted.
  __device__ __forceinline__ void barrier() const {
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
  }
  __device__ __forceinline__ void put(int part, const WarpMoments<A>& mine) const {
    const int lane = static_cast<int>(threadIdx.x % kWarpSize);
    if (lane < ctas) {
      std::uint32_t words[sizeof(mine) / 4];
      memcpy(words, &mine, sizeof(mine));
      const std::uint32_t to = of_cta(local(parts + part), lane);
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(mine) / 4); ++i) {
        asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to + i * 4), "r"(words[i])
                     : "memory");
      }
    }
  }

 private:
  __device__ __forceinline__ static std::uint32_t local(const void* pointer) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
  }
  // The same place in the shared memory of another CTA.
  __device__ __forceinline__ static std::uint32_t of_cta(std::uint32_t address, int rank) {
    std::uint32_t mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
  }
};

#endif

}  // namespace fused_op::cuda
