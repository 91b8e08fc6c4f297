// The forward of long rows, many of them in turn (sm_90): a cluster keeps weight and bias in
// registers, copies rows into shared memory some turns ahead, and takes the moments of the next row
// while those of this one are on their way between its CTAs. Bits are those of forward_long.cuh.
// Included by launch_*.cu only; torch-free.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "core/norm_args.h"
#include "core/row_source.h"
#include "cuda/cluster_exchange.cuh"
#include "cuda/cluster_layout.h"
#include "cuda/dependent_launch.cuh"
#include "cuda/forward_long.cuh"

namespace fused_op::cuda {

// How a warp's part of a row comes into shared memory. Each thread copies what it will read: sooner
// there, where few rows come in turn.
struct CopyByThread {
  template <typename Norm>
  static constexpr int kStages = kMinStages;  // with four 11.2 12.6 us at 256x32768

  template <typename Norm>
  __device__ __forceinline__ static CopyByThread begin(std::uint64_t*) {
    return {};
  }
  // From this lane's first vector on, `left` bytes or none are in the row.
  template <typename T>
  __device__ __forceinline__ void start(int, std::uint32_t to, const T* from, int left) const {
    const std::uintptr_t address = global_address(from);
#pragma unroll
    for (int at = 0; at < kPartVectors * kVectorBytes; at += kWarpSize * kVectorBytes) {
      if (at < left) {
        copy_async(to + at, address + at);
      }
    }
  }
  __device__ __forceinline__ void commit() const {
    __pipeline_commit();  // an empty group too: the count of groups is the count of rows
  }
  // The part in this stage; kLater others may still be on their way.
  template <int kLater>
  __device__ __forceinline__ void await(int, unsigned) const {
    __pipeline_wait_prior(kLater);
  }
};

// Or one lane asks for all of them, in bulk (PTX ISA: cp.async.bulk, mbarrier), and the L2 cache
// evicts last what they are copied from. H200, bf16, us by thread and in bulk: LayerNorm 137.5
// 133.3 at 4096x32768, 136.1 131.2 at 2048x65536, 140.1 134.8 at 1024x131072, RMSNorm 134.2 129.6
// at 512x262144; but 11.2 11.5 at 256x32768, 3.7 3.9 at 1x262144. (In backward a warp's pieces are
// of 512 bytes: 257 283 at 512x262144.)
struct CopyInBulk {
  // With three and with four: LayerNorm 131.6 129.4 at 2048x65536, RMSNorm 130.2 131.8 at
  // 512x262144.
  template <typename Norm>
  static constexpr int kStages = Norm::kCentered ? 4 : 3;

  std::uint64_t* arrivals;  // [kStages, kPipelinedParts] mbarriers

  template <typename Norm>
  __device__ __forceinline__ static CopyInBulk begin(std::uint64_t* arrivals) {
    const CopyInBulk copies{arrivals};
    if (threadIdx.x % kWarpSize == 0) {
#pragma unroll
      for (int stage = 0; stage < kStages<Norm>; ++stage) {
        make_barrier(copies.arrival(stage));
      }
      publish_barriers();
    }
    return copies;
  }
  template <typename T>
  __device__ __forceinline__ void start(int stage, std::uint32_t to, const T* from,
                                        int left) const {
    __syncwarp();  // all lanes have read what is overwritten now
    if (threadIdx.x % kWarpSize == 0 && left > 0) {
      const int bytes = min(left, kPartVectors * kVectorBytes);
      expect_bytes(arrival(stage), bytes);
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
          "[%1], %2, [%3], %4;" ::"r"(to),
          "l"(from), "r"(bytes), "r"(arrival(stage)), "l"(evict_last())
          : "memory");
    }
  }
  __device__ __forceinline__ void commit() const {}
  // The stage was filled an even (0) or odd (1) number of times before. (ClusterExchange waits with
  // the scope of the cluster: there other CTAs write what arrives.)
  template <int kLater>
  __device__ __forceinline__ void await(int stage, unsigned times) const {
    asm volatile(
        "{\n"
        "  .reg .pred done;\n"
        "again:\n"
        "  mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "  @!done bra again;\n"
        "}" ::"r"(arrival(stage)),
        "r"(times)
        : "memory");
  }

 private:
  __device__ __forceinline__ std::uint32_t arrival(int stage) const {
    return shared_address(arrivals + stage * kPipelinedParts + threadIdx.x / kWarpSize);
  }
};

// grid: clusters of as many CTAs as it takes to have cta_parts parts of a row in each; block: a
// warp for each of them. Dynamic shared memory: pipelined_shared_bytes().
template <typename W, typename Norm, typename T, typename Copy>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    norm_forward_pipelined_kernel(const __grid_constant__ NormForwardArgs args, int cta_parts) {
#if __CUDA_ARCH__ >= 900  // never launched before
  using Source = Plain<T>;
  using A = Accumulator<T>;
  using Part = PartOf<Source, int>;
  constexpr int N = Source::kElements;
  constexpr int kVectors = Part::kVectors;
  constexpr int kStages = Copy::template kStages<Norm>;

  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int ctas = static_cast<int>(cluster_size());
  const std::int64_t clusters = gridDim.x / ctas;
  const int width = static_cast<int>(args.cols);
  const int row_parts = Part::count(width);
  const int part = static_cast<int>(cluster_rank()) * cta_parts + warp;
  // Computed where it is used: in a register of its own it makes LayerNorm spill.
  const auto first_col = [&] { return Part::col(part, 0); };
  const A cols = static_cast<A>(width);
  const A inverse_cols = reciprocal(cols);

  __shared__ std::uint64_t arrivals[kPipelinedSlots];
  extern __shared__ uint4 shared[];
  auto* const parts = reinterpret_cast<WarpMoments<A>*>(shared);
  const std::int64_t first_row = cluster_id();
  const ClusterExchange<WarpMoments<A>, kPipelinedSlots> exchange{
      parts, arrivals, row_parts, ctas, cluster_rows(args.rows, first_row, clusters)};
  exchange.begin();
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    if (const std::int64_t row = first_row + stage * clusters; row < args.rows) {
      prefetch_row<kVectors>(row_of<T>(args.input, row), first_col(), kWarpSize * N, width);
    }
  }
  await_kernels_before();

  __shared__ std::uint64_t copied[kStages * kPipelinedParts];
  const Copy copies = Copy::template begin<Norm>(copied);
  const std::uint32_t held = shared_address(parts + kPipelinedSlots * row_parts) +
                             (warp * kVectors * kWarpSize + lane) * kVectorBytes;
  const std::uint32_t stage_bytes = cta_parts * kPartVectors * kVectorBytes;
  const auto copy = [&](std::int64_t row, int stage) {
    if (row < args.rows) {
      copies.start(stage, held + stage * stage_bytes, row_of<T>(args.input, row) + first_col(),
                   (width - first_col()) * static_cast<int>(sizeof(T)));
    }
    copies.commit();
  };
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    copy(first_row + stage * clusters, stage);
  }
  Affine<W, Norm, N> affine[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    affine[i] = {args, Part::col(part, i), width};
  }
  exchange.ready();
  if (part >= row_parts) {  // a warp too many in the last CTA
    return;
  }

  const auto vectors_in = [&](int stage) { return HeldVectors<T, N>{held + stage * stage_bytes}; };
  const auto send_moments = [&](unsigned number, int stage) {
    exchange.send(number, part,
                  part_moments<Norm, VectorAccess, Source, A>(vectors_in(stage), part, width));
  };
  copies.template await<kStages - 1>(0, 0);
  send_moments(0, 0);
  int stage = 0;
  unsigned times = 0;   // that the stages have been filled before, modulo 2
  unsigned number = 0;  // of the cluster's rows
  for (std::int64_t row = first_row; row < args.rows; row += clusters, ++number) {
    const int next_stage = stage + 1 == kStages ? 0 : stage + 1;
    times ^= next_stage == 0 ? 1 : 0;
    if (row + clusters < args.rows) {
      copies.template await<kStages - 2>(next_stage, times);
      send_moments(number + 1, next_stage);
    }
    WarpMoments<A>* const row_moments = exchange.await(number);
    const Moments<A> moments = long_moments<Norm, Source>(row_moments, width);
    const bool saves = part == 0 && lane == 0;
    if (!trusted(moments, cols)) {  // in the whole cluster
      finish_untrusted_long<W, Norm, Source, VectorAccess, A>(args, row, part, part + 1, saves,
                                                              ClusterParts<A>{row_moments, ctas});
    } else {
      const Normalizer<A> normalizer =
          normalizer_of<Norm>(args, moments, A(1), inverse_cols, row, saves);
      const std::uintptr_t target = global_address(target_of<Source>(args, row) + first_col());
      const HeldVectors<T, N> vectors = vectors_in(stage);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const Pack<T, N> pack = output_of(affine[i], vectors[i], normalizer);
        store_if(Part::col(part, i) < width,
                 reinterpret_cast<void*>(target + i * kWarpSize * kVectorBytes), pack.words);
      }
    }
    copy(row + kStages * clusters, stage);
    stage = next_stage;
  }
#endif
}

}  // namespace fused_op::cuda
