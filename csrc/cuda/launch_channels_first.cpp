// The launches of norms over channels.
#include "cuda/launch.h"

namespace fused_op::cuda {
namespace {

template <typename Args>
KernelKey key_of(KernelKind kind, const Args& args, const ChannelsFirstPlan& plan) {
  return KeyBits(kind)
      .add(bits(args.kind), 3)
      .add(bits(args.dtype), 2)
      .add(bits(args.param_dtype), 2)
      .add(args.silu, 1)
      .add(bits(plan.pack), 4)
      .add(bits(plan.warps), 5)
      .add(bits(plan.groups), 4)
      .add(bits(plan.channels), 32)
      .key();
}

template <typename Args>
const Kernel& kernel_of(KernelKind kind, const char* header, const Args& args,
                        ChannelsFirstPlan plan, const DeviceInfo& device) {
  KernelKey key = key_of(kind, args, plan);
  if (plan.channels > 0 && has_too_many_kernels(key, device)) {
    plan.channels = 0;
    key = key_of(kind, args, plan);
  }
  return require_kernel(
      key, device, [&] { return KernelSource{.header = header, .name = kernel_name(args, plan)}; });
}

LaunchShape shape_of(const ChannelsFirstPlan& plan) {
  return {.grid = dim3(static_cast<unsigned>(plan.ctas)),
          .block = dim3(kWarpSize, static_cast<unsigned>(plan.warps),
                        static_cast<unsigned>(plan.groups))};
}

}  // namespace

void launch_channels_first(const ChannelsFirstForwardArgs& args, const DeviceInfo& device,
                           cudaStream_t stream) {
  const ChannelsFirstPlan plan = plan_channels_first(args, device);
  const Kernel& kernel =
      kernel_of(KernelKind::kChannelsFirstForward, kChannelsFirstForwardHeader, args, plan, device);
  launch(kernel, shape_of(plan), {&args, &plan.tiles}, device, stream);
}

void launch_channels_first(const ChannelsFirstBackwardArgs& args, const DeviceInfo& device,
                           cudaStream_t stream) {
  const ChannelsFirstPlan plan = plan_channels_first(args, device);
  const Kernel& kernel = kernel_of(KernelKind::kChannelsFirstBackward, kChannelsFirstBackwardHeader,
                                   args, plan, device);
  const BackwardSpec spec = spec_of(args);
  const bool sums = plan.partials_bytes > 0;
  const Kernel* const adder = sums ? &add_partials_kernel(spec, device) : nullptr;
  const void* const partials = sums ? args.workspace : nullptr;
  const cudaError_t status =
      launch(kernel, shape_of(plan), {&args, &plan.tiles, &partials}, device, stream);
  if (sums && status == cudaSuccess) {
    launch_add_partials(*adder, args, spec, partials, plan.all_groups(), device, stream);
  }
}

}  // namespace fused_op::cuda
