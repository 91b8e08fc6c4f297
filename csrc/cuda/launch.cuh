// The launchers of one dtype pair: tile, grid, shared memory, <<<>>>. Included by launch_*.cu only.
#pragma once

#include <algorithm>
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
               : function.template operator()<ElementAccess>();
}

// A dense argument, as rows; one row where it is a parameter.
inline ConstRows dense(const void* data, std::int64_t stride = 0) { return {data, stride}; }

template <typename T, typename W>
cudaError_t launch_forward(const NormForwardArgs& args, cudaStream_t stream) {
  const std::int64_t vectors = ceil_div(args.cols, kVector<T>);
  with_norm(args.kind, [&]<typename Norm>() {
    with_source<T>(args.residual, [&]<typename Source>() {
      with_access<T>(args.cols,
                     {args.input, args.residual, dense(args.output), dense(args.sum),
                      dense(args.weight), dense(args.bias)},
                     [&]<typename Access>() {
                       if (vectors > kMaxForwardVectors) {
                         const auto grid = static_cast<unsigned>(args.rows);
                         norm_forward_streamed_kernel<W, Norm, Source, Access>
                             <<<grid, kMaxRowThreads, 0, stream>>>(args);
                         return;
                       }
                       with_forward_tile(vectors, [&]<typename Tile>() {
                         const int row_threads = Tile::kLanes * row_warps<Tile>(vectors);
                         const int threads = row_threads <= kWarpSize ? 128 : row_threads;
                         const auto grid =
                             static_cast<unsigned>(ceil_div(args.rows, threads / row_threads));
                         norm_forward_kernel<W, Norm, Source, Access, Tile>
                             <<<grid, threads, 0, stream>>>(args);
                       });
                     });
    });
  });
  return cudaGetLastError();
}

// How a backward call is cut up; a function of its args and the device.
struct BackwardPlan {
  bool at_once;              // norm_backward_kernel; else row sums, then columns
  int threads;               // of a CTA of norm_backward_kernel
  std::size_t shared_bytes;  // of it
  std::int64_t parts;        // rows of partial sums
  std::size_t row_sums_bytes;
  std::size_t partials_bytes;
};

template <typename W, typename Norm, typename Source, typename Tile>
BackwardPlan plan_backward(const NormBackwardArgs& args) {
  using T = typename Source::Element;
  using A = Accumulator<T>;
  using Layout = BackwardLayout<W, Source, Tile>;
  const DeviceInfo& device = device_info();
  const std::int64_t vectors = ceil_div(args.cols, kVector<T>);
  BackwardPlan plan{};
  const int row_threads = Tile::kLanes * row_warps<Tile>(vectors);
  const int most_threads = std::min<int>(
      Layout::kThreads, (device.shared_bytes - 1024) / (Layout::kSlots * kVectorBytes));
  plan.at_once = vectors <= kMaxBackwardVectors && row_threads <= most_threads;
  if (plan.at_once) {
    // As many rows side by side as the CTA holds, but first a CTA for every multiprocessor.
    const std::int64_t rows_per_sm = ceil_div(args.rows, device.multiprocessors);
    const int unit = std::max(row_threads, kWarpSize);
    const std::int64_t units =
        std::clamp<std::int64_t>(ceil_div(rows_per_sm * row_threads, unit), 1, most_threads / unit);
    plan.threads = static_cast<int>(units) * unit;
    plan.shared_bytes = static_cast<std::size_t>(plan.threads) * Layout::kSlots * kVectorBytes;
    plan.parts = std::min<std::int64_t>(device.multiprocessors * Layout::kCtasPerSm,
                                        ceil_div(args.rows, plan.threads / row_threads));
  } else {
    const std::int64_t slabs = ceil_div(vectors, kColumnThreads);
    plan.parts = std::clamp<std::int64_t>(ceil_div(device.multiprocessors * 8, slabs), 1,
                                          std::min<std::int64_t>(args.rows, 65535));
    plan.row_sums_bytes = static_cast<std::size_t>(args.rows) * sizeof(PullbackSums<A>);
    plan.row_sums_bytes = (plan.row_sums_bytes + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
  }
  if (args.grad_weight != nullptr || args.grad_bias != nullptr) {
    plan.partials_bytes =
        static_cast<std::size_t>(plan.parts) * Norm::kGrads * args.cols * sizeof(A);
  }
  return plan;
}

template <typename T, typename Function>
auto with_backward_variant(const NormBackwardArgs& args, Function&& function) {
  return with_norm(args.kind, [&]<typename Norm>() {
    return with_source<T>(args.grad_sum, [&]<typename Source>() {
      return with_backward_tile(ceil_div(args.cols, kVector<T>), [&]<typename Tile>() {
        return function.template operator()<Norm, Source, Tile>();
      });
    });
  });
}

template <typename T, typename W>
std::size_t backward_workspace(const NormBackwardArgs& args) {
  return with_backward_variant<T>(args, [&]<typename Norm, typename Source, typename Tile>() {
    const BackwardPlan plan = plan_backward<W, Norm, Source, Tile>(args);
    return plan.row_sums_bytes + plan.partials_bytes;
  });
}

template <typename W, typename A>
cudaError_t launch_sum_partials(const NormBackwardArgs& args, const A* partials, std::int64_t parts,
                                int grads, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ceil_div(args.cols, kWarpSize)), grads);
  config.blockDim = dim3(kWarpSize, kSumRows);
  config.stream = stream;
  // Its CTAs are placed while the last rows still run, and wait there for them.
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = device_info().overlaps_launches ? 1 : 0;
  return cudaLaunchKernelEx(&config, sum_partials_kernel<W, A>, partials, static_cast<int>(parts),
                            grads, args.cols, static_cast<W*>(args.grad_weight),
                            static_cast<W*>(args.grad_bias));
}

template <typename T, typename W>
cudaError_t launch_backward(const NormBackwardArgs& args, cudaStream_t stream) {
  return with_backward_variant<T>(args, [&]<typename Norm, typename Source, typename Tile>() {
    using A = Accumulator<T>;
    const BackwardPlan plan = plan_backward<W, Norm, Source, Tile>(args);
    auto* const row_sums = static_cast<PullbackSums<A>*>(args.workspace);
    auto* const partials =
        plan.partials_bytes == 0
            ? nullptr
            : reinterpret_cast<A*>(static_cast<char*>(args.workspace) + plan.row_sums_bytes);
    with_access<T>(
        args.cols,
        {args.x, args.grad_output, args.grad_sum, dense(args.grad_input), dense(args.weight)},
        [&]<typename Access>() {
          if (plan.at_once) {
            const auto kernel = norm_backward_kernel<W, Norm, Source, Access, Tile>;
            cudaFuncSetAttribute(
                kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                static_cast<int>(plan.shared_bytes));  // a failure shows at the launch
            kernel<<<static_cast<unsigned>(plan.parts), plan.threads, plan.shared_bytes, stream>>>(
                args, partials);
          } else {
            const auto slabs =
                static_cast<unsigned>(ceil_div(ceil_div(args.cols, kVector<T>), kColumnThreads));
            norm_backward_row_sums_kernel<W, Norm, Source, Access>
                <<<static_cast<unsigned>(args.rows), kMaxRowThreads, 0, stream>>>(args, row_sums);
            norm_backward_columns_kernel<W, Norm, Source, Access>
                <<<dim3(slabs, static_cast<unsigned>(plan.parts)), kColumnThreads, 0, stream>>>(
                    args, row_sums, partials);
          }
        });
    const cudaError_t launched = cudaGetLastError();
    if (launched != cudaSuccess || partials == nullptr) {
      return launched;
    }
    return launch_sum_partials<W>(args, partials, plan.parts, Norm::kGrads, stream);
  });
}

}  // namespace fused_op::cuda
