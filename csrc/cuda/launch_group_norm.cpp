// The launches of group norms.
#include <type_traits>

#include "cuda/launch.h"

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

// Adds up `slices` sums of each channel of each sample.
void add_sums(const GroupNormBackwardArgs& args, int slices, const DeviceInfo& device,
              cudaStream_t stream) {
  int lanes = 1;  // of a warp, for a sample
  while (lanes < kWarpSize && lanes < slices) {
    lanes *= 2;
  }
  launch(sums_kernel(args, device),
         {.grid = cta_grid(args.channels), .block = dim3(kGroupSumsThreads)},
         {&args, &slices, &lanes}, device, stream);
}

// A kernel that reads images whose channels are neighbours.
struct NhwcKernel {
  int number;  // of the kernel, in keys
  const char* header;
  const char* name;
  bool has_silu;
};
constexpr NhwcKernel kNhwcMoments{0, kNhwcForwardHeader, "moments", false};
constexpr NhwcKernel kNhwcForward{1, kNhwcForwardHeader, "forward", true};
constexpr NhwcKernel kNhwcSums{2, kNhwcBackwardHeader, "sums", true};
constexpr NhwcKernel kNhwcBackward{3, kNhwcBackwardHeader, "backward", true};

template <typename Args>
void launch_nhwc(const NhwcKernel& which, const Args& args, const GroupNormNhwcPlan& plan,
                 const GroupNormNhwcSteps& steps, std::int64_t shared_bytes,
                 const DeviceInfo& device, cudaStream_t stream) {
  const bool silu = args.silu && which.has_silu;
  const KernelKey key = KeyBits(KernelKind::kGroupNormNhwc)
                            .add(true, 1)
                            .add(bits(which.number), 2)
                            .add(bits(args.dtype), 2)
                            .add(bits(plan.pack), 4)
                            .add(silu, 1)
                            .key();
  const Kernel& kernel = require_kernel(key, device, [&] {
    return KernelSource{.header = which.header,
                        .name = nhwc_kernel_name(which.name, args.dtype, plan.pack, silu)};
  });
  kernel.allow_shared(static_cast<int>(shared_bytes), device);
  launch(kernel,
         {.grid = cta_grid(args.samples * steps.slabs * steps.tiles),
          .block = dim3(static_cast<unsigned>(plan.threads)),
          .shared_bytes = shared_bytes},
         {&args, &steps}, device, stream);
}

// The second of the three kernels, with a CTA for each group.
template <typename Args>
void launch_nhwc_groups(const Args& args, int slabs, const DeviceInfo& device,
                        cudaStream_t stream) {
  constexpr bool kIsForward = std::is_same_v<Args, GroupNormForwardArgs>;
  const KernelKey key = KeyBits(KernelKind::kGroupNormNhwc)
                            .add(false, 1)
                            .add(kIsForward, 1)
                            .add(args.dtype == DType::kFloat64, 1)
                            .key();
  const Kernel& kernel = require_kernel(key, device, [&] {
    return KernelSource{
        .header = kIsForward ? kNhwcForwardHeader : kNhwcBackwardHeader,
        .name = nhwc_kernel_name(kIsForward ? "channels" : "gradients", args.dtype)};
  });
  launch(kernel, {.grid = cta_grid(args.all_groups()), .block = dim3(kNhwcGroupThreads)},
         {&args, &slabs}, device, stream);
}

void launch_nhwc(const GroupNormForwardArgs& args, const DeviceInfo& device, cudaStream_t stream) {
  const GroupNormNhwcPlan plan = *plan_group_norm_nhwc(args);
  launch_nhwc(kNhwcMoments, args, plan, plan.sums, plan.sums_shared(args.dtype, true), device,
              stream);
  launch_nhwc_groups(args, plan.sums.slabs, device, stream);
  launch_nhwc(kNhwcForward, args, plan, plan.write_steps(args, true, device),
              plan.write_shared(args.dtype, true), device, stream);
}

void launch_nhwc(const GroupNormBackwardArgs& args, const DeviceInfo& device, cudaStream_t stream) {
  const GroupNormNhwcPlan plan = *plan_group_norm_nhwc(args);
  launch_nhwc(kNhwcSums, args, plan, plan.sums, plan.sums_shared(args.dtype, false), device,
              stream);
  if (args.grad_input != nullptr) {
    launch_nhwc_groups(args, plan.sums.slabs, device, stream);
    launch_nhwc(kNhwcBackward, args, plan, plan.write_steps(args, false, device),
                plan.write_shared(args.dtype, false), device, stream);
  }
  if (args.wants_sums()) {
    add_sums(args, plan.sums.slabs, device, stream);
  }
}

}  // namespace

void launch_group_norm(const GroupNormForwardArgs& args, const DeviceInfo& device,
                       cudaStream_t stream) {
  if (args.nhwc) {
    launch_nhwc(args, device, stream);
  } else {
    launch_groups(args, 1, device, stream);
  }
}

void launch_group_norm(const GroupNormBackwardArgs& args, const DeviceInfo& device,
                       cudaStream_t stream) {
  if (args.nhwc) {
    launch_nhwc(args, device, stream);
    return;
  }
  const int slices = launch_groups(args, 2, device, stream).steps.slots_of_plane;
  if (args.wants_sums()) {
    add_sums(args, slices, device, stream);
  }
}

}  // namespace fused_op::cuda
