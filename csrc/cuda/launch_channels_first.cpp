// The launches of norms over channels.
#include "cuda/launch.h"

namespace fused_op::cuda {
namespace {

template <typename Args>
KeyBits key_of(KernelKind kind, const Args& args) {
  return KeyBits(kind)
      .add(bits(args.kind), 3)
      .add(bits(args.dtype), 2)
      .add(bits(args.param_dtype), 2)
      .add(args.silu, 1);
}
KernelKey key_of(const ChannelsFirstForwardArgs& args, const ChannelsFirstPlan& plan) {
  return key_of(KernelKind::kChannelsFirstForward, args)
      .add(bits(plan.pack), 4)
      .add(bits(plan.warps), 5)
      .add(bits(plan.groups), 4)
      .add(bits(plan.channels), 32)
      .add(bits(plan.ctas_per_sm), 4)
      .key();
}
KernelKey key_of(const ChannelsFirstBackwardArgs& args, const ChannelsFirstBackwardPlan& plan) {
  return key_of(KernelKind::kChannelsFirstBackward, args)
      .add(plan.whole, 1)
      .add(bits(plan.pack), 4)
      .add(bits(plan.lanes), 6)
      .add(bits(plan.slices), 8)
      .key();
}

const Kernel& kernel_of(const ChannelsFirstForwardArgs& args, ChannelsFirstPlan plan,
                        const DeviceInfo& device) {
  KernelKey key = key_of(args, plan);
  if (plan.channels > 0 && has_too_many_kernels(key, device)) {
    plan.channels = 0;
    plan.ctas_per_sm = kThreadsReadingAgain / (kWarpSize * plan.warps * plan.groups);
    key = key_of(args, plan);
  }
  return require_kernel(key, device, [&] {
    return KernelSource{.header = kChannelsFirstForwardHeader, .name = kernel_name(args, plan)};
  });
}
const Kernel& kernel_of(const ChannelsFirstBackwardArgs& args,
                        const ChannelsFirstBackwardPlan& plan, const DeviceInfo& device) {
  const Kernel& kernel = require_kernel(key_of(args, plan), device, [&] {
    return KernelSource{.header = kChannelsFirstBackwardHeader, .name = kernel_name(args, plan)};
  });
  kernel.allow_shared(static_cast<int>(plan.shared_bytes), device);  // plans stay within it
  return kernel;
}

}  // namespace

void launch_channels_first(const ChannelsFirstForwardArgs& args, const DeviceInfo& device,
                           cudaStream_t stream) {
  const ChannelsFirstPlan plan = plan_channels_first(args, device);
  const Kernel& kernel = kernel_of(args, plan, device);
  const LaunchShape shape{.grid = cta_grid(plan.ctas),
                          .block = dim3(kWarpSize, static_cast<unsigned>(plan.warps),
                                        static_cast<unsigned>(plan.groups))};
  launch(kernel, shape, {&args}, device, stream);
}

void launch_channels_first(const ChannelsFirstBackwardArgs& args, const DeviceInfo& device,
                           cudaStream_t stream) {
  const ChannelsFirstBackwardPlan plan = plan_channels_first(args, device);
  const Kernel& kernel = kernel_of(args, plan, device);
  const BackwardSpec spec = spec_of(args);
  const bool sums = plan.partials_bytes > 0;
  const Kernel* const adder = sums ? &add_partials_kernel(spec, device) : nullptr;
  const void* const partials = sums ? args.workspace : nullptr;
  const ChannelsFirstBackwardSteps steps{plan.some, plan.stages};
  const LaunchShape shape{.grid = cta_grid(plan.ctas),
                          .block = dim3(static_cast<unsigned>(plan.threads())),
                          .shared_bytes = plan.shared_bytes};
  const cudaError_t status = launch(kernel, shape, {&args, &steps, &partials}, device, stream);
  if (sums && status == cudaSuccess) {
    launch_add_partials(*adder, args, spec, partials, plan.ctas, device, stream);
  }
}

}  // namespace fused_op::cuda
