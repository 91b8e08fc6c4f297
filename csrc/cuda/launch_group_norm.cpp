// The launches of group norms, and of the transposition before and after them.
#include "cuda/launch.h"
#include "cuda/transpose.h"

namespace fused_op::cuda {
namespace {

const Kernel& kernel_of(const GroupNormArgs& args, const GroupNormPlan& plan, bool forward,
                        const DeviceInfo& device) {
  const KernelKey key = KeyBits(KernelKind::kGroupNorm)
                            .add(forward, 1)
                            .add(bits(args.dtype), 2)
                            .add(bits(plan.pack), 4)
                            .add(bits(plan.at_once), 4)
                            .add(args.silu, 1)
                            .key();
  return require_kernel(key, device, [&] {
    return KernelSource{.header = forward ? kGroupNormForwardHeader : kGroupNormBackwardHeader,
                        .name = group_norm_kernel_name(args, plan, forward)};
  });
}

const Kernel& sums_kernel(const GroupNormArgs& args, const DeviceInfo& device) {
  const KernelKey key =
      KeyBits(KernelKind::kGroupNormSums).add(args.dtype == DType::kFloat64, 1).key();
  return require_kernel(key, device, [&] {
    return KernelSource{.header = kGroupNormBackwardHeader,
                        .name = group_norm_sums_kernel_name(args)};
  });
}

// Returns false if this context's part of the GPU has no room for a cluster.
template <typename Args>
bool launch_plan(const Args& args, const GroupNormPlan& plan, bool forward,
                 const DeviceInfo& device, cudaStream_t stream) {
  const Kernel& kernel = kernel_of(args, plan, forward, device);
  kernel.allow_shared(static_cast<int>(plan.shared_bytes), device);  // plans stay within it
  return launch_clusters(kernel,
                         {.grid = cta_grid(args.all_groups() * plan.steps.cluster),
                          .block = dim3(static_cast<unsigned>(plan.warps * kWarpSize)),
                          .shared_bytes = plan.shared_bytes,
                          .cluster = plan.steps.cluster},
                         {&args, &plan.steps}, device, stream);
}

// Returns the plan that was launched.
template <typename Args>
GroupNormPlan launch_groups(const Args& args, int tensors, const DeviceInfo& device,
                            cudaStream_t stream) {
  const bool forward = tensors == 1;
  GroupNormPlan plan = plan_group_norm(args, tensors, device);
  if (!launch_plan(args, plan, forward, device, stream)) {
    plan = plan_group_norm(args, tensors, device, 1);
    launch_plan(args, plan, forward, device, stream);
  }
  return plan;
}

}  // namespace

void launch_group_norm(const GroupNormForwardArgs& args, const DeviceInfo& device,
                       cudaStream_t stream) {
  launch_groups(args, 1, device, stream);
}

void launch_group_norm(const GroupNormBackwardArgs& args, const DeviceInfo& device,
                       cudaStream_t stream) {
  const Kernel* const adder = args.wants_sums() ? &sums_kernel(args, device) : nullptr;
  const int slices = launch_groups(args, 2, device, stream).steps.slots_of_plane;
  if (adder == nullptr) {
    return;
  }
  int lanes = 1;  // of a warp, for a sample
  while (lanes < kWarpSize && lanes < slices) {
    lanes *= 2;
  }
  launch(*adder, {.grid = cta_grid(args.channels), .block = dim3(kGroupSumsThreads)},
         {&args, &slices, &lanes}, device, stream);
}

void launch_transpose(const TransposeArgs& args, const DeviceInfo& device, cudaStream_t stream) {
  const KernelKey key = KeyBits(KernelKind::kTranspose).add(bits(args.element_bytes), 4).key();
  const Kernel& kernel = require_kernel(key, device, [&] {
    const std::string word = "std::uint" + std::to_string(8 * args.element_bytes) + "_t";
    return KernelSource{.header = kTransposeHeader,
                        .name = "fused_op::cuda::transpose_kernel<" + word + ">"};
  });
  const std::int64_t tiles =
      ceil_div(args.rows, kTransposeTile) * ceil_div(args.cols, kTransposeTile);
  launch(kernel, {.grid = cta_grid(args.matrices * tiles), .block = dim3(kTransposeThreads)},
         {&args}, device, stream);
}

}  // namespace fused_op::cuda
