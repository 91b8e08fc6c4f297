#include "cuda/call_plan.h"

#include "cuda/core_table.h"
#include "cuda/plan.h"

namespace fused_op::cuda {
namespace {

// An address for the tensors of a call, which do not exist. Without an offset, it has every
// alignment that a kernel needs.
void* somewhere(std::uintptr_t offset) { return reinterpret_cast<void*>(4096 + offset); }

ConstRows rows_of(DType dtype, std::int64_t cols, bool aligned) {
  const auto offset = static_cast<std::uintptr_t>(aligned ? 0 : size_of(dtype));
  return {.data = somewhere(offset), .dtype = dtype, .stride = cols, .split = {}};
}

NormForwardArgs forward_args(const CallShape& call) {
  NormForwardArgs args;
  args.kind = call.norm;
  args.dtype = call.sum;
  args.param_dtype = call.parameters;
  args.rounding = call.rounding;
  args.rows = call.rows;
  args.cols = call.cols;
  args.input = rows_of(call.input, call.cols, call.aligned);
  args.output = {somewhere(0), call.output};
  if (call.adds) {
    args.residual = rows_of(call.residual, call.cols, true);
    args.sum = somewhere(0);
  }
  args.dropout.active = call.dropout;
  return args;
}

NormBackwardArgs backward_args(const CallShape& call) {
  const bool one_gradient = !call.adds || (!call.dropout && call.residual == call.input);
  NormBackwardArgs args;
  args.kind = call.norm;
  args.dtype = call.memory_efficient ? call.output : call.sum;
  args.param_dtype = call.parameters;
  args.rounding = call.rounding;
  args.rows = call.rows;
  args.cols = call.cols;
  args.x = rows_of(args.dtype, call.cols, call.aligned);
  args.grad_output = rows_of(call.output, call.cols, true);
  if (call.adds) {
    args.grad_sum = rows_of(call.sum, call.cols, true);
  }
  args.has_residual = call.adds;
  args.grad_input = {somewhere(0), call.input};
  args.grad_residual = {one_gradient ? nullptr : somewhere(0),
                        call.adds ? call.residual : call.input};
  args.grad_weight = somewhere(0);
  args.grad_bias = call.norm == NormKind::kLayerNorm ? somewhere(0) : nullptr;
  args.x_is_output = call.memory_efficient;
  args.dropout.active = call.dropout;
  args.drops_input = call.dropout && call.adds;
  return args;
}

CallPlan plan_of_long(const NormForwardArgs& args, const ForwardSpec& spec,
                      const DeviceInfo& device) {
  const LongForwardPlan plan =
      plan_long_forward(spec, args.rows, args.cols, places_of(args, spec).aligned, device);
  return {{{"pack", plan.pack},
           {"vectors", plan.vectors},
           {"parts", plan.parts},
           {"ahead", plan.ahead},
           {"most_threads", plan.most_threads},
           {"ctas_per_sm", plan.ctas_per_sm},
           {"row_parts", plan.row_parts},
           {"form", static_cast<int>(plan.form)},
           {"words", plan.words},
           {"cluster", plan.cluster},
           {"cta_parts", plan.cta_parts},
           {"threads", plan.threads},
           {"ctas", plan.ctas},
           {"shared_bytes", plan.shared_bytes}},
          {{{.header = header_of(plan), .name = kernel_name(spec, plan)}, false}}};
}

CallPlan plan_of(const NormForwardArgs& args, const DeviceInfo& device) {
  const ForwardSpec spec = spec_of(args);
  if (args.cols > most_forward_cols(spec)) {
    return plan_of_long(args, spec, device);
  }
  const ForwardPlan plan = plan_forward(spec, args.rows, args.cols, places_of(args, spec), device);
  return {{{"pack", plan.pack},
           {"lanes", plan.lanes},
           {"vectors", plan.vectors},
           {"ahead", plan.ahead},
           {"few", plan.few},
           {"most_threads", plan.most_threads},
           {"ctas_per_sm", plan.ctas_per_sm},
           {"width", plan.width},
           {"core", plan.core},
           {"words", plan.words},
           {"flat_threads", plan.flat_threads},
           {"flat_rows", plan.flat_rows},
           {"vector_rows", plan.vector_rows},
           {"threads", plan.threads},
           {"ctas", plan.ctas}},
          {{{.header = header_of(plan), .name = kernel_name(spec, plan)}, plan.core}}};
}

void add(CallPlan& call, const char* header, const std::string& name, bool core = false) {
  call.kernels.push_back({{.header = header, .name = name}, core});
}
void add_partials_kernel(CallPlan& call, const BackwardSpec& spec) {
  add(call, kPartialsHeader, partials_kernel_name(spec), spec.row != DType::kFloat64);
}

CallPlan plan_of(const BackwardSpec& spec, const BackwardFewPlan& plan) {
  return {{{"pack", plan.pack},
           {"lanes", plan.lanes},
           {"vectors", plan.vectors},
           {"keep", plan.keep},
           {"move", static_cast<int>(plan.move)},
           {"row_threads", plan.row_threads},
           {"side_by_side", plan.side_by_side},
           {"row_ctas", plan.row_ctas},
           {"slabs", plan.slabs}},
          {{{.header = kFewHeader, .name = kernel_name(spec, plan)}, false}}};
}

CallPlan plan_of(const BackwardSpec& spec, const BackwardLongPlan& plan) {
  CallPlan call{{{"pack", plan.pack},
                 {"vectors", plan.vectors},
                 {"move", static_cast<int>(plan.move)},
                 {"pieces", plan.pieces},
                 {"slabs", plan.slabs},
                 {"chunks", plan.chunks},
                 {"row_sums_bytes", plan.row_sums_bytes},
                 {"partials_bytes", plan.partials_bytes},
                 {"cluster", plan.cluster},
                 {"stages", plan.stages},
                 {"cluster_shared_bytes", plan.cluster_shared_bytes},
                 {"clusters", plan.clusters},
                 {"cluster_partials_bytes", plan.cluster_partials_bytes}},
                {}};
  if (plan.cluster > 0) {  // the other two run if a launch finds no room for a cluster
    add(call, kClusterHeader, cluster_kernel_name(spec, plan));
  }
  add(call, kColumnsHeader, row_sums_kernel_name(spec, plan));
  add(call, kColumnsHeader, columns_kernel_name(spec, plan));
  if (plan.partials_bytes > 0 || plan.cluster_partials_bytes > 0) {
    add_partials_kernel(call, spec);
  }
  return call;
}

CallPlan plan_of(const NormBackwardArgs& args, const DeviceInfo& device) {
  const BackwardSpec spec = spec_of(args);
  if (!fits_cta(args, spec, device)) {
    const BackwardLongPlan plan = plan_backward_long(args, spec, device);
    return plan_of(spec, plan);
  }
  if (const BackwardFewPlan plan = plan_backward_few(args, spec, device); plan.lanes > 0) {
    return plan_of(spec, plan);
  }
  const BackwardPlan plan = plan_backward(args, spec, device);
  CallPlan call{{{"pack", plan.pack},
                 {"lanes", plan.lanes},
                 {"vectors", plan.vectors},
                 {"most_threads", plan.most_threads},
                 {"ctas_per_sm", plan.ctas_per_sm},
                 {"stages", plan.stages},
                 {"keep", plan.keep},
                 {"parameters_stay", plan.parameters_stay},
                 {"width", plan.width},
                 {"core", plan.core},
                 {"move", static_cast<int>(plan.move)},
                 {"row_threads", plan.row_threads},
                 {"side_by_side", plan.side_by_side},
                 {"ctas", plan.ctas},
                 {"tail_ctas", plan.tail_ctas},
                 {"tail_row", plan.tail_row},
                 {"shared_bytes", plan.shared_bytes},
                 {"partials_bytes", plan.partials_bytes}},
                {{{.header = kBackwardHeader, .name = kernel_name(spec, plan)}, plan.core}}};
  if (plan.partials_bytes > 0) {
    add_partials_kernel(call, spec);
  }
  return call;
}

}  // namespace

CallPlan plan_call(const CallShape& call, const DeviceInfo& device) {
  CallPlan planned =
      call.backward ? plan_of(backward_args(call), device) : plan_of(forward_args(call), device);
  for (PlannedKernel& kernel : planned.kernels) {
    kernel.core &= kHasCoreTable;
  }
  return planned;
}

}  // namespace fused_op::cuda
