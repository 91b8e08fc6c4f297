// How the CTAs of a cluster (sm_90) share small values of a row. Each value is written into the
// shared memory of every CTA and counts down a barrier there, at which the CTA's own threads wait.
// This avoids a barrier of the whole cluster, which costs a fence of all memory (MEMBAR.ALL.GPU):
// H200, bf16, us with such a barrier and this way: 5.1 3.5 at 8x65536, 9.0 5.9 at 1x262144. PTX
// ISA: mbarrier, st.async. Torch-free.
#pragma once

#include "cuda/memory.cuh"
#include "cuda/row_sum.cuh"

namespace fused_op::cuda {

// Barriers in shared memory (mbarrier). Each opens when the bytes that expect_bytes() announced
// have been written; the announcement is its one arrival. A thread makes its barriers and publishes
// them before any other thread uses them.
__device__ __forceinline__ void make_barrier(std::uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void expect_bytes(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

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

// How many of a grid's rows a cluster processes that begins with first_row.
__device__ __forceinline__ unsigned cluster_rows(std::int64_t rows, std::int64_t first_row,
                                                 std::int64_t clusters) {
  return static_cast<unsigned>(rows - first_row + clusters - 1) / static_cast<unsigned>(clusters);
}

// The address of the same place in the shared memory of another CTA of the cluster.
__device__ __forceinline__ std::uint32_t of_cta(const void* pointer, int rank) {
  std::uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(mapped)
      : "r"(shared_address(pointer)), "r"(rank));
  return mapped;
}

// Exchanges the values of the rows that a cluster processes in turn. The values of a row have a
// slot, which every kSlots-th row shares. With four slots, a warp may send its value of row n + 1
// before it awaits row n: when it sends that of row n + 4, it has received row n + 2, for which all
// warps sent theirs after they had read row n.
template <typename Value, int kSlots>
struct ClusterExchange {
  Value* values;            // [kSlots, per_row], at the same place in every CTA
  std::uint64_t* arrivals;  // [kSlots] mbarriers, likewise
  int per_row;
  int ctas;
  unsigned rows;  // how many this cluster processes

  // All threads of the cluster call both. Work between begin() and ready() must not need other
  // CTAs, because they may not run yet.
  __device__ __forceinline__ void begin() const {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        make_barrier(shared_address(arrivals + slot));
      }
      publish_barriers();
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }
  __device__ __forceinline__ void ready() const {
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    if (threadIdx.x == 0) {  // values that have already arrived count too
#pragma unroll
      for (int row = 0; row < kSlots; ++row) {
        expect(row);
      }
    }
  }

  // Sends value `index` of the row to every CTA. All lanes of a warp call it.
  __device__ __forceinline__ void send(unsigned row, int index, const Value& value) const {
    const int lane = static_cast<int>(threadIdx.x % kWarpSize);
    if (lane < ctas) {
      const std::uint32_t to = of_cta(of_row(row) + index, lane);
      const std::uint32_t signal = of_cta(arrivals + row % kSlots, lane);
      std::uint32_t words[sizeof(value) / 4];
      memcpy(words, &value, sizeof(value));
      if constexpr (sizeof(value) == 8) {
        asm volatile(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::
                "r"(to),
            "r"(words[0]), "r"(words[1]), "r"(signal)
            : "memory");
      } else {
        static_assert(sizeof(value) % 16 == 0);
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(value) / 4); i += 4) {
          asm volatile(
              "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, "
              "%4}, [%5];" ::"r"(to + i * 4),
              "r"(words[i]), "r"(words[i + 1]), "r"(words[i + 2]), "r"(words[i + 3]), "r"(signal)
              : "memory");
        }
      }
    }
  }
  // Waits for all values of the row and returns them.
  __device__ __forceinline__ Value* await(unsigned row) const {
    const unsigned slot = row % kSlots;
    asm volatile(
        "{\n"
        "  .reg .pred done;\n"
        "again:\n"
        "  mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "  @!done bra again;\n"
        "}" ::"r"(shared_address(arrivals + slot)),
        "r"(row / kSlots % 2)
        : "memory");
    if (kSlots > 1 && threadIdx.x == 0) {
      expect(row + kSlots);
    }
    return of_row(row);
  }

 private:
  __device__ __forceinline__ Value* of_row(unsigned row) const {
    return values + row % kSlots * per_row;
  }
  __device__ __forceinline__ void expect(unsigned row) const {
    if (row < rows) {
      expect_bytes(shared_address(arrivals + row % kSlots),
                   per_row * static_cast<int>(sizeof(Value)));
    }
  }
};

// Exchanges the parts of one row again, as often as necessary, with barriers of the whole cluster.
// This is slower.
template <typename A>
struct ClusterParts {
  WarpMoments<A>* parts;  // in shared memory, at the same place in every CTA
  int ctas;

  __device__ __forceinline__ void barrier() const {
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
  }
  __device__ __forceinline__ void put(int part, const WarpMoments<A>& mine) const {
    const int lane = static_cast<int>(threadIdx.x % kWarpSize);
    if (lane < ctas) {
      std::uint32_t words[sizeof(mine) / 4];
      memcpy(words, &mine, sizeof(mine));
      const std::uint32_t to = of_cta(parts + part, lane);
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(mine) / 4); ++i) {
        asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to + i * 4), "r"(words[i])
                     : "memory");
      }
    }
  }
};

#endif

}  // namespace fused_op::cuda
