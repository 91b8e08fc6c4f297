// Forward of many long rows in turn (sm_90). A cluster keeps weight and bias in registers, copies
// rows into shared memory some turns ahead, and computes the moments of the next row while those of
// the current row travel between its CTAs. For rows that need no work before their moments;
// LayerNorm gains most. Compiled by nvcc and by NVRTC; torch-free.
#pragma once

#include <type_traits>

#include "cuda/cluster_exchange.cuh"
#include "cuda/long_rows.cuh"

namespace fused_op::cuda {

// A warp's part of some rows, which one lane copies into shared memory in bulk (PTX ISA:
// cp.async.bulk, mbarrier). The L2 cache evicts the source of the copies last.
template <typename Tile>
struct StagedParts {
  static constexpr int kPartBytes = Tile::kPartCols / Tile::kPack * kVectorBytes;
  static constexpr int kStages = Tile::kAhead;  // rows in shared memory

  std::uint32_t held;         // address of stage 0 in shared memory
  std::uint32_t arrivals;     // address of kStages mbarriers
  std::uint32_t stage_bytes;  // bytes from one stage to the next

  __device__ __forceinline__ void begin() const {
    if (threadIdx.x % kWarpSize == 0) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
        make_barrier(arrivals + stage * 8);
      }
      publish_barriers();
    }
  }
  // Starts to copy the first `bytes` bytes of the part, which are those inside the row.
  __device__ __forceinline__ void copy(int stage, const void* from, int bytes) const {
    __syncwarp();  // all lanes have read what is overwritten now
    if (threadIdx.x % kWarpSize == 0) {
      expect_bytes(arrivals + stage * 8, bytes);
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
          "[%1], %2, [%3], %4;" ::"r"(held + stage * stage_bytes),
          "l"(from), "r"(bytes), "r"(arrivals + stage * 8), "l"(evict_last())
          : "memory");
    }
  }
  // Waits for a stage that was filled an even (0) or odd (1) number of times before.
  // (ClusterExchange waits with the scope of the cluster, because other CTAs write what arrives
  // there.)
  __device__ __forceinline__ void await(int stage, unsigned times) const {
    asm volatile(
        "{\n"
        "  .reg .pred done;\n"
        "again:\n"
        "  mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "  @!done bra again;\n"
        "}" ::"r"(arrivals + stage * 8),
        "r"(times)
        : "memory");
  }
};

// Prefetches what the warp copies first into the L2 cache, while the previous kernel still runs:
// `count` elements of its part of each row.
template <typename Op, typename Tile>
__device__ __forceinline__ void prefetch_first_rows(const NormForwardArgs& args,
                                                    std::int64_t first_row, std::int64_t clusters,
                                                    int part, int count) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
#pragma unroll
  for (int stage = 0; stage < StagedParts<Tile>::kStages; ++stage) {
    const std::int64_t row = first_row + stage * clusters;
    if (row < args.rows) {
      const auto* const from = typename Op::Source(args, row).row() + part * Tile::kPartCols;
#pragma unroll
      for (int i = 0; i < Tile::kVectors; ++i) {
        const int first = i * Tile::kStep + lane * Tile::kPack;
        if (first < count) {
          prefetch(from + first);
        }
      }
    }
  }
}

template <typename Tile>
__device__ __forceinline__ Lane<kWarpSize, Tile::kStep, Tile::kSure, true> lane_in_turn(
    int part, std::int64_t cols) {
  const int lane = static_cast<int>(threadIdx.x % kWarpSize);
  return {part * Tile::kPartCols + lane * Tile::kPack, static_cast<int>(Tile::width(cols)), true};
}

// This lane's packs of a stage. Each is read from shared memory when it is needed.
template <typename Row, int N>
struct HeldPacks {
  std::uint32_t first;  // address in shared memory

  __device__ __forceinline__ Pack<Row, N> operator[](int i) const {
    Pack<Row, N> pack;
    load_shared_bytes<kVectorBytes>(first + i * kWarpSize * kVectorBytes, pack.words);
    return pack;
  }
};

// Normalises this lane's packs and stores them.
template <typename Op, typename Tile, typename Lane, typename Parameters, typename A>
__device__ __forceinline__ void write_held(
    const NormForwardArgs& args, std::int64_t row, const Lane& lane,
    Parameters (&parameters)[Tile::kVectors],
    const HeldPacks<typename Op::Source::Row, Tile::kPack>& held, const Normalizer<A>& normalizer) {
  using Y = typename Op::Epilogue::Output;
  constexpr int N = Tile::kPack;
  Y* const output = static_cast<Y*>(args.output.data) + row * lane.width + lane.first;
  const std::uintptr_t target = global_address(output);
  typename Op::Epilogue epilogue(args, row, lane);
#pragma unroll
  for (int i = 0; i < Tile::kVectors; ++i) {
    A values[N];
    to_values(held[i], values);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      values[j] = Op::Norm::normalized(values[j], normalizer);
    }
    if constexpr (Op::Norm::kCentered) {  // unpacked weight and bias would take 64 registers
      stay_packed(parameters[i]);
    }
    const typename Op::Epilogue::template Beside<N, 1> nothing{};
    epilogue.template apply<typename Op::Norm>(parameters[i], nothing, i, values);
    const Pack<Y, N> pack = rounded<Y>(values);
    static_assert(sizeof(pack) == kVectorBytes);
    store_if(lane.template valid<N>(i) > 0,
             reinterpret_cast<void*>(target + i * Tile::kStep * static_cast<int>(sizeof(Y))),
             pack.words);
  }
}

// Whether a bulk copy moves what a warp has of a row, and there is nothing else to read.
template <typename Op, typename Tile>
constexpr bool kTakenInTurn =
    std::is_same_v<typename Op::Source, Plain<typename Op::Source::Row>> && Op::Access::kWhole &&
    std::is_same_v<typename Op::Args, NormForwardArgs> && Tile::kParts == 1 &&
    sizeof(Pack<typename Op::Source::Row, Tile::kPack>) == kVectorBytes;

// grid: clusters with as many CTAs as it takes to give each of them cta_parts parts of a row;
// block: one warp for each part. Dynamic shared memory: kStages times these parts.
template <typename Op, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    forward_in_turn_kernel(const __grid_constant__ NormForwardArgs args, int cta_parts) {
#if __CUDA_ARCH__ >= 900  // the kernel is never launched on older GPUs
  using Norm = typename Op::Norm;
  using Source = typename Op::Source;
  using Epilogue = typename Op::Epilogue;
  using Row = typename Source::Row;
  using A = Accumulator<Row>;
  using Staged = StagedParts<Tile>;
  constexpr int N = Tile::kPack;
  constexpr int kStages = Staged::kStages;
  static_assert(kTakenInTurn<Op, Tile>, "a row is copied as it lies, and nothing beside it");

  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kWarpSize;
  const int ctas = static_cast<int>(cluster_size());
  const std::int64_t clusters = gridDim.x / ctas;
  const int width = static_cast<int>(Tile::width(args.cols));
  const int row_parts = (width + Tile::kPartCols - 1) / Tile::kPartCols;
  const int part = static_cast<int>(cluster_rank()) * cta_parts + warp;
  const int count = Tile::part_width(part, width);
  // The lane is made where it is used. In registers of its own it makes LayerNorm spill.
  const auto lane = [&] { return lane_in_turn<Tile>(part, args.cols); };

  __shared__ std::uint64_t arrivals[kInTurnSlots];
  __shared__ std::uint64_t copied[Tile::kThreads / kWarpSize * kStages];
  alignas(16) __shared__ WarpMoments<A> slots[kInTurnSlots * kMaxSlots];
  static_assert(sizeof(arrivals) + sizeof(copied) + sizeof(slots) <= kInTurnOwn);
  alignas(kStagedAlignment) extern __shared__ uint4 shared[];
  const std::int64_t first_row = cluster_id();
  const ClusterExchange<WarpMoments<A>, kInTurnSlots> exchange{
      slots, arrivals, row_parts, ctas, cluster_rows(args.rows, first_row, clusters)};
  exchange.begin();
  const Staged staged{shared_address(shared) + warp * Staged::kPartBytes,
                      shared_address(copied + warp * kStages),
                      static_cast<std::uint32_t>(cta_parts * Staged::kPartBytes)};
  staged.begin();
  prefetch_first_rows<Op, Tile>(args, first_row, clusters, part, count);
  await_kernels_before();
  const auto copy = [&](std::int64_t row, int stage) {
    if (row < args.rows && count > 0) {
      const Row* const from = Source(args, row).row() + part * Tile::kPartCols;
      staged.copy(stage, from, count * static_cast<int>(sizeof(Row)));
    }
  };
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    copy(first_row + stage * clusters, stage);
  }
  typename Epilogue::template Parameters<N> parameters[Tile::kVectors];
  load_parameters<Op, Tile>(args, first_row, lane(), parameters);
  exchange.ready();
  if (count <= 0) {  // a surplus warp of the last CTA
    return;
  }

  const auto held_in = [&](int stage) {
    return HeldPacks<Row, N>{staged.held + stage * staged.stage_bytes +
                             thread % kWarpSize * kVectorBytes};
  };
  const auto send = [&](unsigned number, int stage, unsigned times) {
    staged.await(stage, times);
    exchange.send(number, part, moments_of_part<Op, Tile, A>(lane(), held_in(stage), count));
  };
  send(0, 0, 0);
  unsigned number = 0;  // counts the cluster's rows
  for (std::int64_t row = first_row; row < args.rows; row += clusters, ++number) {
    const int stage = static_cast<int>(number % kStages);
    if (row + clusters < args.rows) {
      const unsigned next = number + 1;
      send(next, static_cast<int>(next % kStages), next / kStages % 2);
    }
    WarpMoments<A>* const of_row = exchange.await(number);
    const Moments<A> moments = merge_slots<Norm, Tile>(of_row, width);
    const bool saves = part == 0 && thread == 0;
    if (!trusted(moments, static_cast<A>(width))) {  // all CTAs of the cluster decide the same
      finish_untrusted_long<Op, Tile, A>(args, row, part, part + 1, 1, saves,
                                         ClusterParts<A>{of_row, ctas});
    } else {
      const Normalizer<A> normalizer =
          normalizer_of<Norm>(args, moments, A(1), reciprocal(static_cast<A>(width)), row, saves);
      write_held<Op, Tile>(args, row, lane(), parameters, held_in(stage), normalizer);
    }
    copy(row + kStages * clusters, stage);
  }
#endif
}

}  // namespace fused_op::cuda
