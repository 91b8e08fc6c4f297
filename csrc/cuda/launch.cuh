// The launchers of one dtype pair: tile, grid, shared memory, launch. Included by launch_*.cu only.
#pragma once

#include <algorithm>
#include <atomic>
#include <initializer_list>

#include "core/dispatch.h"
#include "cuda/fused_op_kernel.cuh"
#include "cuda/launch.h"

namespace fused_op::cuda {

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

inline bool vector_aligned(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % kVectorBytes == 0;
}

// Calls function with VectorAccess where every row of every argument allows it.
template <typename T, typename Function>
auto with_access(std::int64_t cols, std::initializer_list<ConstRows> rows, Function&& function) {
  bool whole = cols % kVector<T> == 0;
  for (const ConstRows& each : rows) {
    whole = whole && vector_aligned(each.data) && each.stride % kVector<T> == 0;
  }
  return whole ? function.template operator()<VectorAccess>()
               : function.template operator()<ShiftedAccess>();
}

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

// A dense argument, as rows.
inline ConstRows dense(const void* data) { return {.data = data}; }

// Rows too long for registers. Over a cluster where the largest one can hold a row: as few CTAs as
// do, or, where rows are few, as many as fill the GPU with four warps or more each.
template <typename W, typename Norm, typename Source, typename Access>
void launch_long_rows(const NormForwardArgs& args, std::int64_t vectors, cudaStream_t stream) {
  const DeviceInfo& device = device_info();
  const std::int64_t parts = ceil_div(vectors, kPartVectors);
  constexpr std::size_t kSlot = sizeof(WarpMoments<Accumulator<typename Source::Element>>);
  if constexpr (!Source::kFlexible) {
    if (parts <= device.max_cluster * kClusterParts) {
      const std::int64_t least = ceil_div(parts, kClusterParts);
      const std::int64_t most =
          std::max(least, std::min<std::int64_t>(device.max_cluster, parts / 4));
      const std::int64_t wanted =
          std::clamp(ceil_div(device.multiprocessors, args.rows), least, most);
      const std::int64_t cta_parts = ceil_div(parts, wanted);
      const auto ctas = static_cast<unsigned>(ceil_div(parts, cta_parts));
      const std::int64_t warps = ceil_div(cta_parts, ceil_div(cta_parts, kClusterWarps));
      const auto kernel = norm_forward_cluster_kernel<W, Norm, Source, Access>;
      static AttributeOnce carveout, large;
      carveout.set(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                   cudaSharedmemCarveoutMaxShared, device);
      if (ctas > 8) {  // more than every GPU with clusters has to offer
        large.set(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1, device);
      }
      launch(kernel,
             {.grid = static_cast<unsigned>(args.rows) * ctas,
              .block = static_cast<unsigned>(warps * kWarpSize),
              .shared_bytes = parts * kSlot + cta_parts * kPartVectors * kVectorBytes,
              .cluster = ctas},
             stream, args, static_cast<int>(cta_parts));
      return;
    }
  }
  launch(norm_forward_streamed_kernel<W, Norm, Source, Access>,
         {.grid = static_cast<unsigned>(args.rows),
          .block = kMaxRowThreads,
          .shared_bytes = std::min<std::int64_t>(parts, kMaxParts) * kSlot},
         stream, args);
}

// Whether the warps of a row take one vector a lane, not three or four: where rows are so few that
// all of these are on the GPU at once. H200, bf16, us, with four and with one: 1.97 1.37 at
// 1x1024, 2.40 1.95 at 64x1024, 2.76 2.41 at 512x1024, 3.17 3.88 at 1024x1024; 2.27 2.02 at
// 1x4096, 3.58 3.53 at 256x4096; 2.66 2.83 at 1x8192.
template <typename Tile>
bool in_spread(const NormForwardArgs& args, std::int64_t vectors) {
  const std::int64_t row_threads = row_warps<Tile>(vectors) * Tile::kVectors * kWarpSize;
  return row_threads <= kMaxSpreadThreads &&
         args.rows * row_threads <= std::int64_t{device_info().multiprocessors} * 512;
}

// Whether a CTA takes its rows as one span.
template <typename T>
bool is_flat(const NormForwardArgs& args) {
  return args.residual.data == nullptr && args.cols < kVector<T> &&
         args.input.stride == args.cols && vector_aligned(args.input.data);
}

template <typename T, typename Function>
auto with_flat_cols(std::int64_t cols, Function&& function) {
  if constexpr (kVector<T> > 4) {
    if (cols > 4) return function.template operator()<8>();
  }
  if constexpr (kVector<T> > 2) {
    if (cols > 2) return function.template operator()<4>();
  }
  return function.template operator()<2>();
}

// Rows that are longer than one vector, or not one span.
template <typename W, typename Norm, typename Source, typename Access>
void launch_rows(const NormForwardArgs& args, cudaStream_t stream) {
  const std::int64_t vectors = ceil_div(args.cols, Source::kElements);
  const auto launch_tile = [&]<typename Tile>() {
    const int row_threads = Tile::kLanes * row_warps<Tile>(vectors);
    if constexpr (Tile::kLanes == kWarpSize && !Source::kFlexible) {
      if (in_spread<Tile>(args, vectors)) {
        launch(norm_forward_kernel<W, Norm, Source, Access, SpreadTile<Tile::kVectors>>,
               {static_cast<unsigned>(args.rows), row_threads * Tile::kVectors}, stream, args);
        return;
      }
    }
    const int threads = row_threads <= kWarpSize ? 128 : row_threads;
    const auto grid = static_cast<unsigned>(ceil_div(args.rows, threads / row_threads));
    launch(norm_forward_kernel<W, Norm, Source, Access, Tile>, {grid, threads}, stream, args);
  };
  constexpr bool kShort = Source::kSplit && !Source::kFlexible;  // at most kMaxSplitBytes
  if constexpr (kShort) {
    with_short_forward_tile(vectors, launch_tile);
  } else if (vectors > (Source::kFlexible ? kMaxFlexibleVectors : kMaxForwardVectors)) {
    launch_long_rows<W, Norm, Source, Access>(args, vectors, stream);
  } else if constexpr (Source::kFlexible) {
    with_flexible_tile(vectors, launch_tile);
  } else {
    with_forward_tile(vectors, launch_tile);
  }
}

template <typename T, typename W>
cudaError_t launch_forward(const NormForwardArgs& args, cudaStream_t stream) {
  with_norm(args.kind, [&]<typename Norm>() {
    if constexpr (kIsFlexible<W>) {
      launch_rows<W, Norm, Flexible<T>, AnyAccess>(args, stream);
    } else if (sizeof(T) < 8 && args.dropout.active) {
      if constexpr (sizeof(T) < 8) {
        launch_rows<W, Norm, DropoutAddResidual<T>, VectorAccess>(args, stream);
      }
    } else if (args.input.split.inner != 0) {
      launch_rows<W, Norm, SplitRows<T>, VectorAccess>(args, stream);
    } else if (is_flat<T>(args)) {
      with_flat_cols<T>(args.cols, [&]<int kMaxCols>() {
        launch(norm_forward_flat_kernel<W, Norm, T, kMaxCols>,
               {static_cast<unsigned>(ceil_div(args.rows, kFlatRows)), kFlatThreads}, stream, args);
      });
    } else {
      with_source<T>(args.residual, [&]<typename Source>() {
        with_access<T>(
            args.cols, {args.input, args.residual, dense(args.output.data), dense(args.sum)},
            [&]<typename Access>() { launch_rows<W, Norm, Source, Access>(args, stream); });
      });
    }
  });
  return cudaGetLastError();
}

// Shared memory that a backward CTA may ask for at its launch: less what its kernel declares.
inline int most_dynamic_shared(const DeviceInfo& device) { return device.shared_bytes - 1024; }

// How a backward call is cut up; a function of its args and the device.
struct BackwardPlan {
  bool few;                  // norm_backward_few_kernel
  bool at_once;              // norm_backward_kernel; else row sums, then columns
  int row_threads;           // of one row in norm_backward_kernel
  int threads;               // of a CTA of it
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
template <typename Source, typename Tile>
bool is_few(const NormBackwardArgs& args) {
  return !Tile::kOneWarp && !Source::kFlexible && !Source::kSplit && !Source::kDrops &&
         args.rows <= kMaxFewRows && args.rows * args.cols * size_of(args.dtype) <= kMaxFewBytes;
}

template <typename W, typename Norm, typename Source, typename Access, typename Tile>
BackwardPlan plan_backward(const NormBackwardArgs& args) {
  using T = typename Source::Element;
  using A = Accumulator<T>;
  using Layout = BackwardLayout<W, Source, Access, Tile>;
  const DeviceInfo& device = device_info();
  const std::int64_t vectors = ceil_div(args.cols, Source::kElements);
  BackwardPlan plan{};
  const int row_threads = Tile::kLanes * row_warps<Tile>(vectors);
  plan.row_threads = row_threads;
  constexpr int kGroupBytes = Layout::kGroupBlocks * kVectorBytes;
  const auto threads_with = [&](int group_blocks) {
    const int groups = most_dynamic_shared(device) / (group_blocks * kVectorBytes);
    return std::min(Layout::kThreads, groups * Tile::kLanes);
  };
  const int most_threads = threads_with(Layout::kGroupBlocks);
  if constexpr (Source::kFlexible) {
    plan.at_once = vectors <= kMaxFlexibleVectors && row_threads <= most_threads;
  } else {
    // Decided alike for both kinds of access: a row's sums must not depend on its address.
    using Shifted = BackwardLayout<W, Source, ShiftedAccess, Tile>;
    plan.at_once = vectors <= kMaxBackwardVectors &&
                   row_threads <= std::min(most_threads, threads_with(Shifted::kGroupBlocks));
  }
  if (plan.at_once && is_few<Source, Tile>(args)) {
    plan.few = true;
    plan.threads = std::max(kFewThreads / row_threads, 1) * row_threads;
    return plan;
  }
  if (plan.at_once) {
    // One CTA where it holds all rows, and needs no partial sums then. Else a CTA for every
    // multiprocessor comes first, and then as many rows side by side as it holds.
    const std::int64_t rows_per_cta = args.rows <= most_threads / row_threads
                                          ? args.rows
                                          : ceil_div(args.rows, device.multiprocessors);
    const int unit = std::max(row_threads, kWarpSize);
    const std::int64_t units = std::clamp<std::int64_t>(ceil_div(rows_per_cta * row_threads, unit),
                                                        1, most_threads / unit);
    plan.threads = static_cast<int>(units) * unit;
    plan.shared_bytes = static_cast<std::size_t>(plan.threads / Tile::kLanes) * kGroupBytes;
    plan.parts = std::min<std::int64_t>(device.multiprocessors * Layout::kCtasPerSm,
                                        ceil_div(args.rows, plan.threads / row_threads));
  } else {
    const std::int64_t slabs = ceil_div(vectors, kColumnThreads);
    // At least 16 rows a chunk: fewer cost less than partial sums and their addition.
    plan.parts = std::clamp<std::int64_t>(device.multiprocessors * 8 / slabs, 1,
                                          std::clamp<std::int64_t>(args.rows / 16, 1, 65535));
    plan.row_sums_bytes =
        static_cast<std::size_t>(args.rows) * row_pieces(vectors) * sizeof(PullbackSums<A>);
    plan.row_sums_bytes = (plan.row_sums_bytes + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
  }
  const bool wanted = args.grad_weight != nullptr || args.grad_bias != nullptr;
  // A single part is the gradients already, but is not added to them.
  if (wanted && (plan.parts > 1 || args.add_grads)) {
    plan.partials_bytes = static_cast<std::size_t>(plan.parts) * Norm::kGrads *
                          partial_stride<Source>(args.cols) * sizeof(A);
  }
  return plan;
}

template <typename T, typename W, typename Function>
auto with_backward_variant(const NormBackwardArgs& args, Function&& function) {
  return with_norm(args.kind, [&]<typename Norm>() {
    if constexpr (kIsFlexible<W>) {
      const std::int64_t vectors = ceil_div(args.cols, Flexible<T>::kElements);
      return with_flexible_tile(vectors, [&]<typename Tile>() {
        return function.template operator()<Norm, Flexible<T>, AnyAccess, Tile>();
      });
    } else {
      const auto with_tile = [&]<typename Source, typename Access>() {
        return with_backward_tile<!Source::kDrops>(
            ceil_div(args.cols, kVector<T>), [&]<typename Tile>() {
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
  return with_backward_variant<T, W>(
      args, [&]<typename Norm, typename Source, typename Access, typename Tile>() {
        const BackwardPlan plan = plan_backward<W, Norm, Source, Access, Tile>(args);
        return plan.row_sums_bytes + plan.partials_bytes;
      });
}

template <typename W, typename A>
void launch_sum_partials(const NormBackwardArgs& args, const A* partials, std::int64_t parts,
                         int grads, std::int64_t stride, cudaStream_t stream) {
  const ParameterGradients targets{
      {args.grad_weight, args.grad_bias}, args.param_dtype, args.add_grads};
  launch(sum_partials_kernel<W, A>,
         {dim3(static_cast<unsigned>(ceil_div(args.cols, kSumCols<A>)), grads),
          dim3(kSumLanes, kSumRows)},
         stream, partials, static_cast<int>(parts), grads, stride, args.cols, targets);
}

template <typename T, typename W>
cudaError_t launch_backward(const NormBackwardArgs& args, cudaStream_t stream) {
  return with_backward_variant<T, W>(
      args, [&]<typename Norm, typename Source, typename Access, typename Tile>() {
        using A = Accumulator<T>;
        const BackwardPlan plan = plan_backward<W, Norm, Source, Access, Tile>(args);
        auto* const row_sums = static_cast<PullbackSums<A>*>(args.workspace);
        auto* const partials =
            plan.partials_bytes == 0
                ? nullptr
                : reinterpret_cast<A*>(static_cast<char*>(args.workspace) + plan.row_sums_bytes);
        constexpr bool kFew =
            !Tile::kOneWarp && !Source::kFlexible && !Source::kSplit && !Source::kDrops;
        if (kFew && plan.few) {
          if constexpr (kFew) {
            const dim3 block(plan.row_threads, plan.threads / plan.row_threads);
            const bool dx = args.grad_input.data != nullptr;
            const bool columns = args.grad_weight != nullptr || args.grad_bias != nullptr;
            const std::int64_t row_ctas = dx ? ceil_div(args.rows, block.y) : 0;
            const std::int64_t slabs =
                columns ? ceil_div(args.cols, kSlabLanes * Source::kElements) : 0;
            launch(norm_backward_few_kernel<W, Norm, Source, Access, (Tile::kVectors > 2 ? 4 : 2)>,
                   {static_cast<unsigned>(row_ctas + slabs), block}, stream, args,
                   static_cast<int>(row_ctas), Tile::kVectors);
          }
        } else if (plan.at_once) {
          const auto kernel = norm_backward_kernel<W, Norm, Source, Access, Tile>;
          static AttributeOnce most_shared;
          most_shared.set(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                          most_dynamic_shared(device_info()), device_info());
          const dim3 block(plan.row_threads, plan.threads / plan.row_threads);
          const std::int64_t step = plan.parts * block.y;
          const auto bytes = [&](std::int64_t stride, DType dtype) {
            return step * stride * size_of(dtype);
          };
          const RowSteps steps{step,
                               {bytes(args.x.stride, args.x.dtype),
                                bytes(args.grad_output.stride, args.grad_output.dtype),
                                bytes(args.grad_sum.stride, args.grad_sum.dtype)},
                               bytes(args.cols, args.dtype),
                               args.x.split.inner != 0 || args.grad_output.split.inner != 0};
          launch(kernel, {static_cast<unsigned>(plan.parts), block, plan.shared_bytes}, stream,
                 args, steps, partials);
        } else if constexpr (Source::kFlexible || !Source::kSplit) {  // those are short
          const std::int64_t vectors = ceil_div(args.cols, Source::kElements);
          const auto slabs = static_cast<unsigned>(ceil_div(vectors, kColumnThreads));
          launch(norm_backward_row_sums_kernel<W, Norm, Source, Access>,
                 {static_cast<unsigned>(args.rows) * row_pieces(vectors), kMaxRowThreads}, stream,
                 args, row_sums);
          launch(norm_backward_columns_kernel<W, Norm, Source, Access>,
                 {dim3(slabs, static_cast<unsigned>(plan.parts)), kColumnThreads}, stream, args,
                 row_sums, partials);
        }
        if (partials != nullptr) {
          launch_sum_partials<W>(args, partials, plan.parts, Norm::kGrads,
                                 partial_stride<Source>(args.cols), stream);
        }
        return cudaGetLastError();
      });
}

}  // namespace fused_op::cuda
