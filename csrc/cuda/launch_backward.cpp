// Launches backward for rows that fit into a CTA, and the addition of partial sums.
#include <algorithm>
#include <stdexcept>

#include "core/pack.h"
#include "cuda/backward_tile.h"
#include "cuda/core_table.h"
#include "cuda/launch.h"

namespace fused_op::cuda {
namespace {

KernelKey key_of(const BackwardSpec& spec, const BackwardPlan& plan) {
  return KeyBits(KernelKind::kBackward)
      .add(spec)
      .add(bits(plan.pack), 4)
      .add(bits(plan.lanes), 6)
      .add(bits(plan.vectors), 6)
      .add(bits(plan.most_threads), 10)
      .add(bits(plan.ctas_per_sm), 3)
      .add(bits(plan.stages), 2)
      .add(plan.keep, 1)
      .add(plan.parameters_stay, 1)
      .add(bits(plan.move), 2)
      .add(bits(plan.width), 32)
      .add(plan.core, 1)
      .add(plan.tail_ctas > 0, 1)
      .key();
}
KernelKey key_of(const BackwardSpec& spec, const BackwardFewPlan& plan) {
  return KeyBits(KernelKind::kFewBackward)
      .add(spec)
      .add(bits(plan.pack), 4)
      .add(bits(plan.lanes), 6)
      .add(bits(plan.vectors), 6)
      .add(plan.keep, 1)
      .add(bits(plan.move), 2)
      .key();
}

void launch_few(const NormBackwardArgs& args, const BackwardSpec& spec, const BackwardFewPlan& plan,
                const DeviceInfo& device, cudaStream_t stream) {
  const Kernel& kernel = require_kernel(key_of(spec, plan), device, [&] {
    return KernelSource{.header = kFewHeader, .name = kernel_name(spec, plan)};
  });
  const int row_ctas = static_cast<int>(plan.row_ctas);
  const auto threads = static_cast<unsigned>(plan.row_threads);
  const auto side_by_side = static_cast<unsigned>(plan.side_by_side);
  // If rows share a warp, the block has one dimension.
  const dim3 block = plan.lanes < 32 ? dim3(threads * side_by_side) : dim3(threads, side_by_side);
  launch(kernel, {.grid = cta_grid(plan.row_ctas + plan.slabs), .block = block}, {&args, &row_ctas},
         device, stream);
}

// How many rows are followed by enough of their tensor that a block of 16 bytes cannot reach past
// its end.
std::int64_t rows_before_end(const ConstRows& of, std::int64_t rows) {
  constexpr std::int64_t kReach = kVectorBytes - 1;
  const bool split = of.split.inner > 0;
  const std::int64_t step =
      (split ? std::min(of.stride, of.split.outer_stride) : of.stride) * size_of(of.dtype);
  if (of.data == nullptr) {
    return rows;
  }
  return step == 0 || (split && step < kReach) ? 0 : rows - ceil_div(kReach, step);
}

void launch_rows(const NormBackwardArgs& args, const BackwardSpec& spec, BackwardPlan plan,
                 const DeviceInfo& device, cudaStream_t stream) {
  const KernelKey key = key_of_plan(plan.width, device, [&] { return key_of(spec, plan); });
  const Kernel& kernel = require_kernel(key, device, [&] {
    return KernelSource{.header = kBackwardHeader,
                        .name = kernel_name(spec, plan),
                        .built_in = plan.core ? core_backward(spec, plan) : nullptr,
                        .structs = structs_of(spec.variant)};
  });
  if (!kernel.allow_shared(static_cast<int>(plan.shared_bytes), device)) {
    throw std::runtime_error("fused_op: the GPU refuses the shared memory of a kernel");
  }
  const Kernel* const adder =
      plan.partials_bytes > 0 ? &add_partials_kernel(spec, device) : nullptr;
  // The step from one row of a team to the next. With shared entries, it stays within the entry of
  // the CTA.
  const bool shares_entries = spec.variant != nullptr && spec.variant->shares_entries;
  const std::int64_t ctas = (plan.ctas - plan.tail_ctas) / (shares_entries ? groups_of(spec) : 1);
  const std::int64_t rows = ctas * plan.side_by_side;
  const auto bytes = [&](const ConstRows& of) { return rows * of.stride * size_of(of.dtype); };
  const bool beside = spec.variant != nullptr && spec.variant->beside.data != nullptr;
  const ConstRows& third = beside ? spec.variant->beside : args.grad_sum;
  const BackwardSteps steps{
      rows,
      (plan.stages - 1) * rows,
      {bytes(args.x), bytes(args.grad_output), bytes(third)},
      std::min({rows_before_end(args.x, args.rows), rows_before_end(args.grad_output, args.rows),
                rows_before_end(third, args.rows)}),
      plan.tail_row,
      plan.ctas - plan.tail_ctas};
  const void* const partials = adder != nullptr ? args.workspace : nullptr;
  const cudaError_t status = launch(kernel,
                                    {.grid = cta_grid(plan.ctas),
                                     .block = dim3(static_cast<unsigned>(plan.row_threads),
                                                   static_cast<unsigned>(plan.side_by_side)),
                                     .shared_bytes = plan.shared_bytes},
                                    {&args, &steps, &partials}, device, stream);
  if (adder != nullptr && status == cudaSuccess) {
    launch_add_partials(*adder, args, spec, partials, plan.ctas / groups_of(spec), device, stream);
  }
}

}  // namespace

const Kernel& add_partials_kernel(const BackwardSpec& spec, const DeviceInfo& device) {
  const KernelKey key = KeyBits(KernelKind::kPartials)
                            .add(bits(spec.parameters), 2)
                            .add(spec.row == DType::kFloat64, 1)
                            .key();
  return require_kernel(key, device, [&] {
    return KernelSource{.header = kPartialsHeader,
                        .name = partials_kernel_name(spec),
                        .built_in = core_partials(spec)};
  });
}

void launch_add_partials(const Kernel& kernel, const NormBackwardArgs& args,
                         const BackwardSpec& spec, const void* partials, std::int64_t parts,
                         const DeviceInfo& device, cudaStream_t stream) {
  constexpr int kRowBytes = kPartialsLanes * kVectorBytes;  // of a CTA's columns
  constexpr int kOwnBytes = kPartialsRows * kRowBytes;      // that the kernel declares
  const int cta_cols = kRowBytes / (is_double(spec) ? 8 : 4);
  const int grads = grads_of(spec.norm);
  const std::int64_t cols = args.cols * groups_of(spec);
  const dim3 grid = cta_grid(ceil_div(cols, cta_cols), grads);
  // With programmatic launch, these CTAs start on whichever SMs free up first, and pile up there.
  // Unused shared memory limits each SM to its share.
  const int ctas = static_cast<int>(grid.x * grid.y);
  const auto per_sm = static_cast<int>(ceil_div(ctas, device.multiprocessors));
  const int most = device.shared_bytes - kOwnBytes - 2048;
  const int unused = std::clamp(device.shared_bytes / per_sm - kOwnBytes - 2048, 0, most);
  const PartialsTargets targets{{args.grad_weight, args.grad_bias}, args.add_grads};
  const int count = static_cast<int>(parts);
  const std::int64_t stride = partials_stride(cols);
  launch(kernel,
         {.grid = grid,
          .block = dim3(kPartialsLanes, kPartialsRows),
          .shared_bytes = kernel.allow_shared(unused, device) ? unused : 0},
         {&partials, &count, &grads, &stride, &cols, &targets}, device, stream);
}

std::size_t backward_workspace(const NormBackwardArgs& args, const Variant* variant,
                               const DeviceInfo& device) {
  const BackwardSpec spec = spec_of(args, variant);
  if (!fits_cta(args, spec, device)) {
    return static_cast<std::size_t>(plan_backward_long(args, spec, device).workspace_bytes());
  }
  if (variant == nullptr && plan_backward_few(args, spec, device).lanes > 0) {
    return 0;
  }
  return static_cast<std::size_t>(plan_backward(args, spec, device).partials_bytes);
}

void launch_backward(const NormBackwardArgs& args, const Variant* variant, const DeviceInfo& device,
                     cudaStream_t stream) {
  const BackwardSpec spec = spec_of(args, variant);
  if (!fits_cta(args, spec, device)) {
    launch_long_backward(args, spec, device, stream);
    return;
  }
  if (variant == nullptr) {
    if (const auto few = plan_backward_few(args, spec, device); few.lanes > 0) {
      launch_few(args, spec, few, device, stream);
      return;
    }
  }
  launch_rows(args, spec, plan_backward(args, spec, device), device, stream);
}

}  // namespace fused_op::cuda
