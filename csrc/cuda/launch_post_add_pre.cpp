// Launches a forward of two norms with an addition between them, if one kernel can take it.
#include "cuda/launch.h"

namespace fused_op::cuda {

bool launch_post_add_pre(PostAddPreForwardArgs& args, const DeviceInfo& device,
                         cudaStream_t stream) {
  if (!meet_in_registers(args)) {
    return false;
  }
  args.input = args.post.input;
  args.post.output.data = args.sum;  // for rows that have to go through memory
  const bool only_sum = args.output.data == nullptr;
  const ForwardSpec post = spec_of(args.post);
  const ForwardSpec pre = spec_of(args);
  ForwardPlan plan = plan_post_add_pre(args, pre, device);
  const auto key_of = [&] {
    return KeyBits(KernelKind::kPostAddPre)
        .add(pre)
        .add(plan)
        .add(bits(post.parameters), 2)
        .add(only_sum, 1)
        .key();
  };
  const KernelKey key = key_of_plan(plan.width, device, key_of);
  // If this kernel is not available, the kernels of the norms take the call, one after the other.
  const Kernel* const kernel = find_kernel(key, device, [&] {
    return KernelSource{.header = kPostAddPreHeader,
                        .name = post_add_pre_kernel_name(post, pre, plan, only_sum)};
  });
  if (kernel == nullptr) {
    return false;
  }
  launch(*kernel, {.grid = cta_grid(plan.ctas), .block = dim3(static_cast<unsigned>(plan.threads))},
         {&args}, device, stream);
  return true;
}

}  // namespace fused_op::cuda
