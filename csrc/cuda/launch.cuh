// The launchers of one dtype pair: tile, grid, shared memory, <<<>>>. Included by launch_*.cu only.
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

// Whether rows that one CTA's registers cannot hold lie over a cluster, or are streamed; the bits
// are the same. A cluster fills the GPU where rows are few, but its launch costs microseconds:
// H200, bf16, streamed and in clusters, share of the copy limit, LayerNorm: 0.81 0.66 at
// 4096x32768, 0.64 0.60 at 2048x65536, 0.57 0.54 at 1024x131072; RmsNorm: 0.87 0.77, 0.69 0.73,
// 0.59 0.70. One row of 262144: 52 us and 7.
template <typename Norm>
bool in_cluster(const NormForwardArgs& args, std::int64_t vectors, const DeviceInfo& device) {
  const std::int64_t warps = row_warps<ClusterTile>(vectors);
  const bool few = args.rows < device.multiprocessors;
  const bool better = !Norm::kCentered && warps >= 64 && warps <= 128;
  return device.hopper && vectors <= kMaxClusterVectors && (few || better);
}

// A row a cluster: as few CTAs as hold it, or, where rows are few, as many as fill the GPU with
// four warps or more each.
template <typename Kernel>
void launch_clusters(Kernel* kernel, AttributeOnce& large, const NormForwardArgs& args,
                     std::int64_t vectors, const DeviceInfo& device, cudaStream_t stream) {
  const std::int64_t warps = row_warps<ClusterTile>(vectors);
  const std::int64_t least = ceil_div(warps, kMaxRowThreads / kWarpSize);
  const std::int64_t most = std::max(least, std::min<std::int64_t>(kMaxCluster, warps / 4));
  const std::int64_t wanted = std::clamp(ceil_div(device.multiprocessors, args.rows), least, most);
  const std::int64_t cta_warps = ceil_div(warps, wanted);
  const auto ctas = static_cast<unsigned>(ceil_div(warps, cta_warps));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(args.rows) * ctas);
  config.blockDim = dim3(static_cast<unsigned>(cta_warps * kWarpSize));
  config.stream = stream;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {ctas, 1, 1};
  config.attrs = &cluster;
  config.numAttrs = 1;
  if (ctas > 8) {  // more than every GPU with clusters has to offer
    large.set(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1, device);
  }
  cudaLaunchKernelEx(&config, kernel, args);
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
  const auto launch = [&]<typename Tile>() {
    const int row_threads = Tile::kLanes * row_warps<Tile>(vectors);
    if constexpr (Tile::kLanes == kWarpSize && !Source::kFlexible) {
      if (in_spread<Tile>(args, vectors)) {
        norm_forward_kernel<W, Norm, Source, Access, SpreadTile<Tile::kVectors>>
            <<<static_cast<unsigned>(args.rows), row_threads * Tile::kVectors, 0, stream>>>(args);
        return;
      }
    }
    const int threads = row_threads <= kWarpSize ? 128 : row_threads;
    const auto grid = static_cast<unsigned>(ceil_div(args.rows, threads / row_threads));
    norm_forward_kernel<W, Norm, Source, Access, Tile><<<grid, threads, 0, stream>>>(args);
  };
  constexpr bool kShort = Source::kSplit && !Source::kFlexible;  // at most kMaxSplitBytes
  if constexpr (kShort) {
    with_short_forward_tile(vectors, launch);
  } else if (vectors > (Source::kFlexible ? kMaxFlexibleVectors : kMaxForwardVectors)) {
    if constexpr (!Source::kFlexible) {
      if (in_cluster<Norm>(args, vectors, device_info())) {
        static AttributeOnce large;
        launch_clusters(norm_forward_kernel<W, Norm, Source, Access, ClusterTile>, large, args,
                        vectors, device_info(), stream);
        return;
      }
    }
    norm_forward_streamed_kernel<W, Norm, Source, Access>
        <<<static_cast<unsigned>(args.rows), kMaxRowThreads, 0, stream>>>(args);
  } else if constexpr (Source::kFlexible) {
    with_flexible_tile(vectors, launch);
  } else {
    with_forward_tile(vectors, launch);
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
        norm_forward_flat_kernel<W, Norm, T, kMaxCols>
            <<<static_cast<unsigned>(ceil_div(args.rows, kFlatRows)), kFlatThreads, 0, stream>>>(
                args);
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
  bool at_once;              // norm_backward_kernel; else row sums, then columns
  int row_threads;           // of one row in norm_backward_kernel
  int threads;               // of a CTA of it
  std::size_t shared_bytes;  // of it
  std::int64_t parts;        // rows of partial sums
  std::size_t row_sums_bytes;
  std::size_t partials_bytes;
};

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
    plan.parts = std::clamp<std::int64_t>(ceil_div(device.multiprocessors * 8, slabs), 1,
                                          std::min<std::int64_t>(args.rows, 65535));
    plan.row_sums_bytes = static_cast<std::size_t>(args.rows) * sizeof(PullbackSums<A>);
    plan.row_sums_bytes = (plan.row_sums_bytes + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
  }
  const bool wanted = args.grad_weight != nullptr || args.grad_bias != nullptr;
  // A single CTA writes the gradients itself, but does not add to them.
  if (wanted && (!plan.at_once || plan.parts > 1 || args.add_grads)) {
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
        return with_backward_tile(ceil_div(args.cols, kVector<T>), [&]<typename Tile>() {
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
cudaError_t launch_sum_partials(const NormBackwardArgs& args, const A* partials, std::int64_t parts,
                                int grads, std::int64_t stride, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ceil_div(args.cols, kSumCols<A>)), grads);
  config.blockDim = dim3(kSumLanes, kSumRows);
  config.stream = stream;
  // Its CTAs are placed while the last rows still run, and wait there for them.
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = device_info().hopper ? 1 : 0;
  const ParameterGradients targets{
      {args.grad_weight, args.grad_bias}, args.param_dtype, args.add_grads};
  return cudaLaunchKernelEx(&config, sum_partials_kernel<W, A>, partials, static_cast<int>(parts),
                            grads, stride, args.cols, targets);
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
        if (plan.at_once) {
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
          kernel<<<static_cast<unsigned>(plan.parts), block, plan.shared_bytes, stream>>>(
              args, steps, partials);
        } else if constexpr (Source::kFlexible || !Source::kSplit) {  // those are short
          const auto slabs = static_cast<unsigned>(
              ceil_div(ceil_div(args.cols, Source::kElements), kColumnThreads));
          norm_backward_row_sums_kernel<W, Norm, Source, Access>
              <<<static_cast<unsigned>(args.rows), kMaxRowThreads, 0, stream>>>(args, row_sums);
          norm_backward_columns_kernel<W, Norm, Source, Access>
              <<<dim3(slabs, static_cast<unsigned>(plan.parts)), kColumnThreads, 0, stream>>>(
                  args, row_sums, partials);
        }
        const cudaError_t launched = cudaGetLastError();
        if (launched != cudaSuccess || partials == nullptr) {
          return launched;
        }
        return launch_sum_partials<W>(args, partials, plan.parts, Norm::kGrads,
                                      partial_stride<Source>(args.cols), stream);
      });
}

}  // namespace fused_op::cuda
