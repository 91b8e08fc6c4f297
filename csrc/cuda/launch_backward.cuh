// The launchers of backward: which kernels, in what shape, with what workspace. Included by
// launch_*.cu only; torch-free.
#pragma once

#include <algorithm>

#include "core/dispatch.h"
#include "cuda/fused_op_kernel.cuh"
#include "cuda/launch.cuh"

namespace fused_op::cuda {

// How a backward call is cut up; a function of its args and the device.
enum class BackwardPath {
  kFewRows,   // norm_backward_few_kernel
  kRows,      // norm_backward_kernel
  kClusters,  // norm_backward_cluster_kernel
  kColumns,   // norm_backward_row_sums_kernel, norm_backward_columns_kernel
};
struct BackwardPlan {
  BackwardPath path;
  int row_threads;           // of one row in norm_backward_kernel
  int threads;               // of a CTA of it
  int stages;                // of it
  std::size_t shared_bytes;  // of it
  std::int64_t parts;        // rows of partial sums
  std::size_t row_sums_bytes;
  std::size_t partials_bytes;
};

// Whether x and dy are so small that reading them twice is the shorter way. H200, bf16, us, partial
// sums and norm_backward_few_kernel: 4.4 4.2 at 256x1024, 5.1 7.3 at 512x1024, 10.1 10.4 at
// 512x4096.
constexpr int kFewThreads = 256;
constexpr std::int64_t kMaxFewRows = 256;
constexpr std::int64_t kMaxFewBytes = 2 << 20;  // of x
inline bool is_few(const NormBackwardArgs& args) {
  return args.rows <= kMaxFewRows && args.rows * args.cols * size_of(args.dtype) <= kMaxFewBytes;
}
template <typename Source, typename Tile>
constexpr bool kHasFewKernel =
    !Tile::kOneWarp && !Source::kFlexible && !Source::kSplit && !Source::kDrops;

// Rows in one pass, by clusters: where there are enough to be worth the start. H200, bf16, us, row
// sums and columns, and clusters: 8.7 15.5 at 8x65536, 11.8 16.3 at 16x65536, 28.3 22.3 at
// 32x65536.
constexpr std::int64_t kMinClusterRows = 32;

template <typename W, typename T>
LaunchShape backward_cluster_shape(std::int64_t vectors, std::int64_t clusters) {
  const unsigned ctas = row_pieces(vectors);
  return {.grid = static_cast<unsigned>(clusters) * ctas,
          .block = kMaxRowThreads,
          .shared_bytes = ClusterRows<W, T>::kSharedBytes,
          .cluster = ctas};
}

// How many clusters take the rows; 0 where none do.
template <typename W, typename Norm, typename T>
std::int64_t backward_clusters(const NormBackwardArgs& args, std::int64_t vectors,
                               const Queue& queue) {
  const DeviceInfo& device = queue.device;
  constexpr int kShared = ClusterRows<W, T>::kSharedBytes;
  const auto pieces = static_cast<int>(row_pieces(vectors));
  if (pieces < 2 || pieces > device.max_cluster || args.rows < kMinClusterRows ||
      kShared > most_dynamic_shared(device)) {
    return 0;
  }
  const auto kernel = norm_backward_cluster_kernel<W, Norm, T>;
  static AttributeOnce most_shared, large;
  static ActiveClusters active;
  most_shared.set(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared, device);
  large.set(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1, device);
  return std::min<std::int64_t>(
      active.count(queue, kernel, backward_cluster_shape<W, T>(vectors, 1)), args.rows);
}

// Few rows for each team of threads: what comes before the first one and after the last one counts.
constexpr std::int64_t kFewSteps = 16;

// Threads of a CTA of norm_backward_kernel. An eighth of the rows that it has room for is left out
// where there are many rows and no lane is idle. H200, bf16, share of the limit with eight and with
// seven rows side by side: 0.917 0.923 at 262144x256, 0.945 0.957 at 131072x1024 (0.945 0.948 on
// another of them); but 0.94 0.89 at 149796x896, where lanes are idle. us with few rows: 16.7 17.3
// at 8192x1024.
template <typename Source, typename Tile>
int best_threads(const NormBackwardArgs& args, int row_threads, int most_threads,
                 std::int64_t rows_per_cta) {
  const int most_rows = most_threads / row_threads;
  const std::int64_t room = std::int64_t{row_threads} * Tile::kVectors * Source::kElements;
  const bool full = Tile::kLanes == kWarpSize && Tile::kVectors <= 2 && args.cols == room;
  const bool many = rows_per_cta > kFewSteps * most_rows;
  return full && many && most_rows >= 8 ? most_threads / 8 * 7 : most_threads;
}

// The fields of norm_backward_kernel.
template <typename W, typename Norm, typename Source, typename Access, typename Tile>
void plan_rows(BackwardPlan& plan, const NormBackwardArgs& args, const DeviceInfo& device,
               int most_threads) {
  using Layout = BackwardLayout<W, Norm, Source, Access, Tile>;
  plan.path = BackwardPath::kRows;
  // One CTA where it holds all rows, and needs no partial sums then. Else a CTA for every
  // multiprocessor comes first, and then as many rows side by side as it holds.
  const std::int64_t rows_per_cta = args.rows <= most_threads / plan.row_threads
                                        ? args.rows
                                        : ceil_div(args.rows, device.multiprocessors);
  const int threads =
      best_threads<Source, Tile>(args, plan.row_threads, most_threads, rows_per_cta);
  const int unit = std::max(plan.row_threads, kWarpSize);
  const std::int64_t units =
      std::clamp<std::int64_t>(ceil_div(rows_per_cta * plan.row_threads, unit), 1, threads / unit);
  plan.threads = static_cast<int>(units) * unit;
  const int side_by_side = plan.threads / plan.row_threads;
  plan.parts = std::min<std::int64_t>(device.multiprocessors * Layout::kCtasPerSm,
                                      ceil_div(args.rows, side_by_side));
  // Two in flight, and the first is there sooner. H200, bf16, us with three and with two: 9.7 9.4
  // at 4096x768, 8.1 7.4 at 2000x1024, 17.3 16.7 at 8192x1024, 48.2 47.4 at 2048x12288.
  const std::int64_t steps = ceil_div(args.rows, plan.parts * side_by_side);
  plan.stages = Layout::kChooses && steps <= kFewSteps ? 2 : Layout::kStages;
  plan.shared_bytes = static_cast<std::size_t>(plan.threads / Tile::kLanes) *
                      Layout::group_blocks(plan.stages) * kVectorBytes;
}

// Bytes of so many rows of partial sums. A single one is the gradients already, but is not added to
// them.
template <typename A, typename Norm, typename Source>
std::size_t partials_bytes(const NormBackwardArgs& args, std::int64_t parts) {
  const bool wanted = args.grad_weight != nullptr || args.grad_bias != nullptr;
  if (!wanted || (parts <= 1 && !args.add_grads)) {
    return 0;
  }
  return static_cast<std::size_t>(parts) * Norm::kGrads * partial_stride<Source>(args.cols) *
         sizeof(A);
}

// The fields of norm_backward_row_sums_kernel and norm_backward_columns_kernel.
template <typename A, typename Source>
void plan_columns(BackwardPlan& plan, const NormBackwardArgs& args, const DeviceInfo& device) {
  plan.path = BackwardPath::kColumns;
  const std::int64_t vectors = ceil_div(args.cols, Source::kElements);
  const std::int64_t slabs = ceil_div(vectors, kColumnThreads);
  // At least 16 rows a chunk: fewer cost less than partial sums and their addition.
  plan.parts = std::clamp<std::int64_t>(device.multiprocessors * 8 / slabs, 1,
                                        std::clamp<std::int64_t>(args.rows / 16, 1, 65535));
  plan.row_sums_bytes =
      static_cast<std::size_t>(args.rows) * row_pieces(vectors) * sizeof(PullbackSums<A>);
  plan.row_sums_bytes = (plan.row_sums_bytes + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
}

template <typename W, typename Norm, typename Source, typename Access, typename Tile>
BackwardPlan plan_backward(const NormBackwardArgs& args, const Queue& queue) {
  using T = typename Source::Element;
  using A = Accumulator<T>;
  using Layout = BackwardLayout<W, Norm, Source, Access, Tile>;
  const DeviceInfo& device = queue.device;
  const std::int64_t vectors = ceil_div(args.cols, Source::kElements);
  BackwardPlan plan{.path = BackwardPath::kColumns};
  const int row_threads = Tile::kLanes * row_warps<Tile>(vectors);
  plan.row_threads = row_threads;
  const auto threads_with = [&](int group_blocks) {
    const int groups = most_dynamic_shared(device) / (group_blocks * kVectorBytes);
    return std::min(Layout::kThreads, groups * Tile::kLanes);
  };
  const int most_threads = threads_with(Layout::kGroupBlocks);
  bool at_once;
  if constexpr (Source::kFlexible) {
    at_once = vectors <= kMaxFlexibleVectors && row_threads <= most_threads;
  } else {
    // Decided alike for both kinds of access: a row's sums must not depend on its address.
    using Shifted = BackwardLayout<W, Norm, Source, ShiftedAccess, Tile>;
    at_once = vectors <= kMaxBackwardVectors &&
              row_threads <= std::min(most_threads, threads_with(Shifted::kGroupBlocks));
  }
  if (at_once && kHasFewKernel<Source, Tile> && is_few(args)) {
    plan.path = BackwardPath::kFewRows;
    plan.threads = std::max(kFewThreads / row_threads, 1) * row_threads;
    return plan;
  }
  if (at_once) {
    plan_rows<W, Norm, Source, Access, Tile>(plan, args, device, most_threads);
  } else if constexpr (kClustersTakeTurns<Source, Access>) {
    plan.parts = backward_clusters<W, Norm, T>(args, vectors, queue);
    if (plan.parts > 0) {
      plan.path = BackwardPath::kClusters;
    }
  }
  if (plan.path == BackwardPath::kColumns) {
    plan_columns<A, Source>(plan, args, device);
  }
  plan.partials_bytes = partials_bytes<A, Norm, Source>(args, plan.parts);
  return plan;
}

// Whether rows that are no whole number of vectors are taken by words. (With a gradient of the sum
// besides, two vectors a lane have no registers for that.)
template <typename Source, typename Access, typename Tile>
constexpr bool kHasWords =
    std::is_same_v<Access, ShiftedAccess> && sizeof(typename Source::Element) <= 4 &&
    Tile::kLanes == kWarpSize && (Source::kGradStreams == 2 || Tile::kVectors != 2);

template <typename T, typename W, typename Function>
auto with_backward_variant(const NormBackwardArgs& args, Function&& function) {
  return with_norm(args.kind, [&]<typename Norm>() {
    if constexpr (kIsFlexible<W>) {
      const std::int64_t vectors = ceil_div(args.cols, Flexible<T>::kElements);
      return with_flexible_tile(vectors, [&]<typename Tile>() {
        return function.template operator()<Norm, Flexible<T>, AnyAccess, Tile>();
      });
    } else {
      const auto with_words = [&]<typename Source, typename Tile>() {
        return rows_aligned<4, T>(args.cols,
                                  {args.x, args.grad_output, dense(args.grad_input.data)})
                   ? function.template operator()<Norm, Source, WordAccess<4>, Tile>()
                   : function.template operator()<Norm, Source, WordAccess<sizeof(T)>, Tile>();
      };
      const auto with_tile = [&]<typename Source, typename Access>() {
        return with_backward_tile<Norm, Source>(args.cols, [&]<typename Tile>() {
          if constexpr (kHasWords<Source, Access, Tile>) {
            if (args.cols % kVector<T> != 0) {  // not where a row of whole vectors is misaligned
              return with_words.template operator()<Source, Tile>();
            }
          }
          return function.template operator()<Norm, Source, Access, Tile>();
        });
      };
      if constexpr (sizeof(T) < 8) {
        if (args.dropout.active) {
          return with_tile.template operator()<DropoutAddResidual<T>, VectorAccess>();
        }
      }
      if (args.x.split.inner != 0 || args.grad_output.split.inner != 0) {
        return with_short_backward_tile(ceil_div(args.cols, kVector<T>), [&]<typename Tile>() {
          return function.template operator()<Norm, SplitRows<T>, VectorAccess, Tile>();
        });
      }
      return with_source<T>(args.grad_sum, [&]<typename Source>() {
        return with_access<T>(
            args.cols, {args.x, args.grad_output, args.grad_sum, dense(args.grad_input.data)},
            [&]<typename Access>() { return with_tile.template operator()<Source, Access>(); });
      });
    }
  });
}

template <typename T, typename W>
std::size_t backward_workspace(const NormBackwardArgs& args) {
  const Queue queue{device_info(), nullptr};
  return with_backward_variant<T, W>(
      args, [&]<typename Norm, typename Source, typename Access, typename Tile>() {
        using A = Accumulator<typename Source::Element>;
        BackwardPlan plan = plan_backward<W, Norm, Source, Access, Tile>(args, queue);
        const std::size_t bytes = plan.row_sums_bytes + plan.partials_bytes;
        if (plan.path != BackwardPath::kClusters) {
          return bytes;
        }
        // At the launch there may be no place for a cluster.
        plan_columns<A, Source>(plan, args, queue.device);
        return std::max(bytes,
                        plan.row_sums_bytes + partials_bytes<A, Norm, Source>(args, plan.parts));
      });
}

// One kernel for rows by words that may begin in the middle of one, and for those that do not.
template <typename T, typename Access>
using FewRowsAccess =
    std::conditional_t<std::is_same_v<Access, WordAccess<4>>, WordAccess<sizeof(T)>, Access>;
template <typename W, typename Norm, typename Source, typename Access, typename Tile>
void launch_few_rows(const NormBackwardArgs& args, const BackwardPlan& plan, const Queue& queue) {
  const dim3 block(plan.row_threads, plan.threads / plan.row_threads);
  const bool dx = args.grad_input.data != nullptr;
  const bool columns = args.grad_weight != nullptr || args.grad_bias != nullptr;
  const std::int64_t row_ctas = dx ? ceil_div(args.rows, block.y) : 0;
  const std::int64_t slabs = columns ? ceil_div(args.cols, kSlabLanes * Source::kElements) : 0;
  using Few = FewRowsAccess<typename Source::Element, Access>;
  queue.launch(norm_backward_few_kernel<W, Norm, Source, Few, (Tile::kVectors > 2 ? 4 : 2)>,
               {static_cast<unsigned>(row_ctas + slabs), block}, args, static_cast<int>(row_ctas),
               Tile::kVectors);
}

template <typename W, typename Norm, typename Source, typename Access, typename Tile, typename A>
void launch_backward_rows(const NormBackwardArgs& args, const BackwardPlan& plan,
                          const Queue& queue, A* partials) {
  const auto kernel = norm_backward_kernel<W, Norm, Source, Access, Tile>;
  static AttributeOnce most_shared;
  most_shared.set(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                  most_dynamic_shared(queue.device), queue.device);
  const dim3 block(plan.row_threads, plan.threads / plan.row_threads);
  const std::int64_t step = plan.parts * block.y;
  const auto bytes = [&](std::int64_t stride, DType dtype) {
    return step * stride * size_of(dtype);
  };
  const RowSteps steps{
      plan.stages,
      step,
      (plan.stages - 1) * step,
      {bytes(args.x.stride, args.x.dtype), bytes(args.grad_output.stride, args.grad_output.dtype),
       bytes(args.grad_sum.stride, args.grad_sum.dtype)},
      bytes(args.cols, args.dtype),
      args.x.split.inner != 0 || args.grad_output.split.inner != 0};
  queue.launch(kernel, {static_cast<unsigned>(plan.parts), block, plan.shared_bytes}, args, steps,
               partials);
}

template <typename W, typename Norm, typename Source, typename Access, typename A>
void launch_columns(const NormBackwardArgs& args, const BackwardPlan& plan, const Queue& queue,
                    A* partials) {
  auto* const row_sums = static_cast<PullbackSums<A>*>(args.workspace);
  const std::int64_t vectors = ceil_div(args.cols, Source::kElements);
  const auto slabs = static_cast<unsigned>(ceil_div(vectors, kColumnThreads));
  queue.launch(norm_backward_row_sums_kernel<W, Norm, Source, Access>,
               {static_cast<unsigned>(args.rows) * row_pieces(vectors), kMaxRowThreads}, args,
               row_sums);
  queue.launch(norm_backward_columns_kernel<W, Norm, Source, Access>,
               {dim3(slabs, static_cast<unsigned>(plan.parts)), kColumnThreads}, args, row_sums,
               partials);
}

// The kernel does not depend on T, but there is one in each file: T tells their attributes apart.
template <typename W, typename T>
void launch_sum_partials(const NormBackwardArgs& args, std::int64_t parts, int grads,
                         std::int64_t stride, const Queue& queue, const Accumulator<T>* partials) {
  using A = Accumulator<T>;
  const ParameterGradients targets{
      {args.grad_weight, args.grad_bias}, args.param_dtype, args.add_grads};
  const auto kernel = sum_partials_kernel<W, A>;
  const dim3 grid(static_cast<unsigned>(ceil_div(args.cols, kSumCols<A>)), grads);
  // Its CTAs find a place as soon as those of the kernel before it leave: all of them would be on
  // the first few multiprocessors. With this much shared memory each takes its share. H200, bf16,
  // us of the backward without and with it: 10.9 10.1 at 4096x768, 18.4 17.8 at 8192x1024, 49.0
  // 48.0 at 2048x12288.
  const DeviceInfo& device = queue.device;
  const std::int64_t per_sm = ceil_div(std::int64_t{grid.x} * grads, device.multiprocessors);
  // What a CTA has already: its own, and what the GPU keeps back for each (1 KiB), with a margin.
  constexpr std::int64_t kOwn = kSumShared<A> + 2048;
  const int unused =
      static_cast<int>(std::max<std::int64_t>(device.shared_bytes / per_sm - kOwn, 0));
  static AttributeOnce most_shared;
  most_shared.set(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared_bytes - kOwn,
                  device);
  queue.launch(kernel, {grid, dim3(kSumLanes, kSumRows), static_cast<std::size_t>(unused)},
               partials, static_cast<int>(parts), grads, stride, args.cols, targets);
}

template <typename T, typename W>
cudaError_t launch_backward(const NormBackwardArgs& args, cudaStream_t stream) {
  const Queue queue{device_info(), stream};
  return with_backward_variant<T, W>(
      args, [&]<typename Norm, typename Source, typename Access, typename Tile>() {
        using A = Accumulator<T>;
        BackwardPlan plan = plan_backward<W, Norm, Source, Access, Tile>(args, queue);
        const auto partials = [&] {
          return plan.partials_bytes == 0
                     ? nullptr
                     : reinterpret_cast<A*>(static_cast<char*>(args.workspace) +
                                            plan.row_sums_bytes);
        };
        if constexpr (kClustersTakeTurns<Source, Access>) {
          if (plan.path == BackwardPath::kClusters) {
            const std::int64_t vectors = ceil_div(args.cols, Source::kElements);
            const LaunchShape shape = backward_cluster_shape<W, T>(vectors, plan.parts);
            if (!queue.launch_clusters(norm_backward_cluster_kernel<W, Norm, T>, shape, args,
                                       partials())) {
              plan_columns<A, Source>(plan, args, queue.device);
              plan.partials_bytes = partials_bytes<A, Norm, Source>(args, plan.parts);
            }
          }
        }
        switch (plan.path) {
          case BackwardPath::kFewRows:
            if constexpr (kHasFewKernel<Source, Tile>) {
              launch_few_rows<W, Norm, Source, Access, Tile>(args, plan, queue);
            }
            break;
          case BackwardPath::kRows:
            launch_backward_rows<W, Norm, Source, Access, Tile>(args, plan, queue, partials());
            break;
          case BackwardPath::kClusters:
            break;  // launched
          case BackwardPath::kColumns:
            if constexpr (Source::kFlexible || !Source::kSplit) {  // those are short
              launch_columns<W, Norm, Source, LongRowAccess<Access>>(args, plan, queue, partials());
            }
            break;
        }
        if (plan.partials_bytes > 0) {
          launch_sum_partials<W, T>(args, plan.parts, Norm::kGrads,
                                    partial_stride<Source>(args.cols), queue, partials());
        }
        return cudaGetLastError();
      });
}

}  // namespace fused_op::cuda
