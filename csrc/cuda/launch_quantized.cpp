// Launches forwards with a quantised output: one kernel if rows are whole vectors and fit into a
// CTA, else a forward into memory and a kernel that reads it.
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

RowPlaces places_without_span(const NormForwardArgs& args, const ForwardSpec& spec) {
  return {.aligned = places_of(args, spec).aligned, .one_span = false};
}

void launch_fused(const QuantizedForwardArgs& args, const ForwardSpec& spec,
                  const DeviceInfo& device, cudaStream_t stream) {
  ForwardPlan plan =
      plan_forward(spec, args.rows, args.cols, places_without_span(args, spec), device);
  const auto key_of_plan = [&] {
    KeyBits key(KernelKind::kQuantizedForward);
    key.add(spec).add(plan);
    return add(key, args.to.rule).key();
  };
  KernelKey key = key_of_plan();
  if (plan.width > 0 && has_too_many_kernels(key, device)) {
    plan.width = 0;
    key = key_of_plan();
  }
  const Kernel& kernel = require_kernel(key, device, [&] {
    return KernelSource{.header = kQuantizedHeader,
                        .name = quantized_kernel_name(spec, plan, args.to.rule)};
  });
  launch(kernel,
         {.grid = dim3(static_cast<unsigned>(plan.ctas)),
          .block = dim3(static_cast<unsigned>(plan.threads))},
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
  launch(kernel, {.grid = dim3(static_cast<unsigned>(args.rows)), .block = dim3(kQuantizeThreads)},
         {&args}, device, stream);
}

}  // namespace fused_op::cuda
