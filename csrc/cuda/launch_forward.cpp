// Launches forward.
#include "cuda/core_table.h"
#include "cuda/launch.h"

namespace fused_op::cuda {
namespace {

KernelKey key_of(const ForwardSpec& spec, const ForwardPlan& plan) {
  return KeyBits(KernelKind::kForward).add(spec).add(plan).key();
}
KernelKey key_of(const ForwardSpec& spec, const LongForwardPlan& plan) {
  return KeyBits(KernelKind::kLongForward)
      .add(spec)
      .add(bits(plan.form), 2)
      .add(plan.words, 1)
      .add(bits(plan.pack), 4)
      .add(bits(plan.vectors), 5)
      .add(bits(plan.parts), 2)
      .add(bits(plan.ahead), 3)
      .add(bits(plan.most_threads), 10)
      .add(bits(plan.ctas_per_sm), 3)
      .add(bits(plan.row_parts), 9)
      .key();
}

// A streamed kernel takes only the first argument. Returns false if there is no room for a cluster.
bool launch_long(const NormForwardArgs& args, const ForwardSpec& spec, LongForwardPlan plan,
                 const DeviceInfo& device, cudaStream_t stream) {
  const KernelKey key = key_of_plan(plan.row_parts, device, [&] { return key_of(spec, plan); });
  const Kernel& kernel = require_kernel(key, device, [&] {
    return KernelSource{.header = header_of(plan),
                        .name = kernel_name(spec, plan),
                        .structs = structs_of(spec.variant)};
  });
  const int shared_bytes = static_cast<int>(plan.shared_bytes);
  if (!kernel.allow_shared(shared_bytes, device) ||
      (plan.cluster > 8 && !kernel.allow_large_clusters(device))) {
    return false;
  }
  std::int64_t ctas = plan.ctas;
  if (plan.form == LongForm::kInTurn) {
    const int active =
        kernel.active_clusters(plan.most_threads, shared_bytes, plan.cluster, device);
    if (active == 0) {
      return false;
    }
    ctas = ctas_in_turn(plan, args.rows, active);
  }
  return launch_clusters(kernel,
                         {.grid = cta_grid(ctas),
                          .block = dim3(static_cast<unsigned>(plan.threads)),
                          .shared_bytes = shared_bytes,
                          .cluster = plan.cluster},
                         {&args, &plan.cta_parts}, device, stream);
}

}  // namespace

void launch_forward(const NormForwardArgs& args, const Variant* variant, const DeviceInfo& device,
                    cudaStream_t stream) {
  const ForwardSpec spec = spec_of(args, variant);
  RowPlaces places = places_of(args, spec);
  if (args.cols > most_forward_cols(spec)) {
    const auto plan = variant != nullptr
                          ? plan_streamed(spec, args.rows, args.cols, places.aligned)
                          : plan_long_forward(spec, args.rows, args.cols, places.aligned, device);
    if (!launch_long(args, spec, plan, device, stream)) {
      launch_long(args, spec, plan_streamed(spec, args.rows, args.cols, places.aligned), device,
                  stream);
    }
    return;
  }
  ForwardPlan plan = plan_forward(spec, args.rows, args.cols, places, device);
  KernelKey key = key_of(spec, plan);
  if (plan.width > 0 && has_too_many_kernels(key, device)) {
    places.one_span = false;  // the width of rows in a span is always a constant
    plan = plan_forward(spec, args.rows, args.cols, places, device);
    plan.width = 0;
    key = key_of(spec, plan);
  }
  const Kernel& kernel = require_kernel(key, device, [&] {
    return KernelSource{.header = header_of(plan),
                        .name = kernel_name(spec, plan),
                        .built_in = plan.core ? core_forward(spec, plan) : nullptr,
                        .structs = structs_of(variant)};
  });
  launch(kernel, {.grid = cta_grid(plan.ctas), .block = dim3(static_cast<unsigned>(plan.threads))},
         {&args}, device, stream);
}

}  // namespace fused_op::cuda
