// Launches forwards with a quantised output: one kernel for the rows that
// quantizes_in_registers() takes, else a forward into memory and a kernel that reads it.
#include "cuda/launch.h"
#include "cuda/quantized_plan.h"

namespace fused_op::cuda {
namespace {

KeyBits& add(KeyBits& key, const QuantizeRule& rule) {
  return key.add(bits(rule.format), 2)
      .add(bits(rule.convention), 2)
      .add(bits(rule.scheme), 2)
      .add(rule.power_of_two, 1);
}

void launch_fused(const QuantizedForwardArgs& args, const ForwardSpec& spec,
                  const DeviceInfo& device, cudaStream_t stream) {
  RowPlaces places = places_of(args, spec);
  places.one_span = false;
  ForwardPlan plan = plan_forward(spec, args.rows, args.cols, places, device);
  const auto key_of = [&] {
    KeyBits key(KernelKind::kQuantizedForward);
    key.add(spec).add(plan);
    return add(key, args.to.rule).key();
  };
  const KernelKey key = key_of_plan(plan.width, device, key_of);
  const Kernel& kernel = require_kernel(key, device, [&] {
    return KernelSource{.header = kQuantizedHeader,
                        .name = quantized_kernel_name(spec, plan, args.to.rule)};
  });
  launch(kernel, {.grid = cta_grid(plan.ctas), .block = dim3(static_cast<unsigned>(plan.threads))},
         {&args}, device, stream);
}

}  // namespace

void launch_quantized(const QuantizedForwardArgs& args, const DeviceInfo& device,
                      cudaStream_t stream) {
  if (quantizes_in_registers(args)) {
    launch_fused(args, spec_of(args), device, stream);
    return;
  }
  KeyBits key(KernelKind::kQuantizeRows);
  key.add(bits(args.output.dtype), 2);
  const Kernel& kernel = require_kernel(add(key, args.to.rule).key(), device, [&] {
    return KernelSource{.header = kQuantizeRowsHeader,
                        .name = quantize_rows_kernel_name(args.output.dtype, args.to.rule)};
  });
  launch_forward(args, nullptr, device, stream);
  launch(kernel, {.grid = cta_grid(args.rows), .block = dim3(kQuantizeThreads)}, {&args}, device,
         stream);
}

}  // namespace fused_op::cuda
