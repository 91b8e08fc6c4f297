// Launches backward for rows that are too long for a CTA.
#include <algorithm>
#include <stdexcept>

#include "core/pack.h"
#include "cuda/backward_long.h"
#include "cuda/launch.h"

namespace fused_op::cuda {
namespace {

KernelKey key_of(KernelKind kind, const BackwardSpec& spec, const BackwardLongPlan& plan,
                 int stages) {
  return KeyBits(kind)
      .add(spec)
      .add(bits(plan.pack), 4)
      .add(bits(plan.vectors), 4)
      .add(bits(plan.move), 2)
      .add(bits(stages), 2)
      .key();
}

// The arguments of a call.
struct LongCall {
  const NormBackwardArgs& args;
  const BackwardSpec& spec;
  const BackwardLongPlan& plan;
  const DeviceInfo& device;
  cudaStream_t stream;

  // The address of the partial sums; null if there are none.
  void* partials(std::int64_t bytes) const {
    return bytes > 0 ? static_cast<char*>(args.workspace) + plan.row_sums_bytes : nullptr;
  }
};

// How many clusters process the rows: as many as the device runs at once, or 0 if it has no room
// for one.
std::int64_t active_clusters(const Kernel& kernel, const LongCall& call) {
  const auto bytes = static_cast<int>(call.plan.cluster_shared_bytes);
  if (!kernel.allow_shared(bytes, call.device) ||
      (call.plan.cluster > 8 && !kernel.allow_large_clusters(call.device))) {
    return 0;
  }
  const int active = kernel.active_clusters(kPieceThreads, bytes, call.plan.cluster, call.device);
  return std::min<std::int64_t>(active, call.plan.clusters);
}

// Reads the rows once, in clusters. Returns false if there is no room for a cluster.
bool launch_in_clusters(const LongCall& call) {
  const auto& [args, spec, plan, device, stream] = call;
  const Kernel& kernel =
      require_kernel(key_of(KernelKind::kClusters, spec, plan, plan.stages), device, [&call] {
        return KernelSource{.header = kClusterHeader,
                            .name = cluster_kernel_name(call.spec, call.plan)};
      });
  const Kernel* const adder =
      plan.cluster_partials_bytes > 0 ? &add_partials_kernel(spec, device) : nullptr;
  const std::int64_t clusters = active_clusters(kernel, call);
  if (clusters == 0) {
    return false;
  }
  const std::int64_t bytes =
      partials_bytes(spec, clusters, args.cols, call.args.wants_sums(), args.add_grads);
  const void* const partials = call.partials(bytes);
  const bool launched = launch_clusters(kernel,
                                        {.grid = cta_grid(clusters * plan.cluster),
                                         .block = dim3(kPieceThreads),
                                         .shared_bytes = plan.cluster_shared_bytes,
                                         .cluster = plan.cluster},
                                        {&args, &partials}, device, stream);
  if (launched && bytes > 0) {
    launch_add_partials(*adder, args, spec, partials, clusters, device, stream);
  }
  return launched;
}

// Computes the sums of the rows, then the gradients by columns.
void launch_columns(const LongCall& call) {
  const auto& [args, spec, plan, device, stream] = call;
  const Kernel& row_sums =
      require_kernel(key_of(KernelKind::kRowSums, row_sums_spec(spec), plan, 0), device, [&call] {
        return KernelSource{.header = kColumnsHeader,
                            .name = row_sums_kernel_name(call.spec, call.plan),
                            .structs = structs_of(call.spec.variant)};
      });
  const Kernel& columns =
      require_kernel(key_of(KernelKind::kColumns, spec, plan, 0), device, [&call] {
        return KernelSource{.header = kColumnsHeader,
                            .name = columns_kernel_name(call.spec, call.plan),
                            .structs = structs_of(call.spec.variant)};
      });
  const Kernel* const adder =
      plan.partials_bytes > 0 ? &add_partials_kernel(spec, device) : nullptr;
  const void* const sums = args.workspace;
  const void* const partials = call.partials(plan.partials_bytes);
  launch(row_sums, {.grid = cta_grid(args.rows * plan.pieces), .block = dim3(kPieceThreads)},
         {&args, &sums}, device, stream);
  const cudaError_t status =
      launch(columns, {.grid = cta_grid(plan.slabs, plan.chunks), .block = dim3(kColumnThreads)},
             {&args, &sums, &partials}, device, stream);
  if (adder != nullptr && status == cudaSuccess) {
    launch_add_partials(*adder, args, spec, partials, plan.chunks, device, stream);
  }
}

}  // namespace

void launch_long_backward(const NormBackwardArgs& args, const BackwardSpec& spec,
                          const DeviceInfo& device, cudaStream_t stream) {
  if (spec.variant != nullptr && !spec.variant->shares_entries &&
      (spec.split || spec.variant->groups > 1)) {
    throw std::logic_error("fused_op: rows too long for a CTA must be one stride apart");
  }
  if (spec.variant != nullptr && spec.variant->shares_entries) {
    throw KernelError("fused_op: this GPU has no room for a row of " + std::to_string(args.cols) +
                      " columns with gradients of shared entries");
  }
  const BackwardLongPlan plan = plan_backward_long(args, spec, device);
  const LongCall call{args, spec, plan, device, stream};
  if (plan.cluster == 0 || !launch_in_clusters(call)) {
    launch_columns(call);
  }
}

}  // namespace fused_op::cuda
