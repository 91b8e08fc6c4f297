#include "cuda/call_plan.h"

#include "cuda/plan.h"

namespace fused_op::cuda {
namespace {

// Where tensors of a call lie that are not there: a multiple of all that a kernel asks for.
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

CallPlan plan_of(const NormForwardArgs& args, const DeviceInfo& device) {
  const ForwardSpec spec = spec_of(args);
  if (!has_plan(spec, args.cols)) {
    return {};
  }
  const ForwardPlan plan =
      plan_forward(spec, args.rows, args.cols, rows_aligned(args, spec), device);
  return {{{"pack", plan.pack},
           {"lanes", plan.lanes},
           {"vectors", plan.vectors},
           {"spread", plan.spread},
           {"ahead", plan.ahead},
           {"few", plan.few},
           {"threads", plan.threads},
           {"ctas_per_sm", plan.ctas_per_sm},
           {"width", plan.width},
           {"words", plan.words},
           {"ctas", plan.ctas}},
          {{.header = kForwardHeader, .name = kernel_name(spec, plan)}}};
}

CallPlan plan_of(const NormBackwardArgs& args, const DeviceInfo& device) {
  const BackwardSpec spec = spec_of(args);
  const BackwardPlan plan = plan_backward(args, spec, device);
  if (plan.lanes == 0) {
    return {};
  }
  CallPlan call{{{"pack", plan.pack},
                 {"lanes", plan.lanes},
                 {"vectors", plan.vectors},
                 {"most_threads", plan.most_threads},
                 {"ctas_per_sm", plan.ctas_per_sm},
                 {"stages", plan.stages},
                 {"keep", plan.keep},
                 {"parameters_stay", plan.parameters_stay},
                 {"stats_ahead", plan.stats_ahead},
                 {"width", plan.width},
                 {"move", static_cast<int>(plan.move)},
                 {"row_threads", plan.row_threads},
                 {"side_by_side", plan.side_by_side},
                 {"ctas", plan.ctas},
                 {"shared_bytes", plan.shared_bytes},
                 {"partials_bytes", plan.partials_bytes}},
                {{.header = kBackwardHeader, .name = kernel_name(spec, plan)}}};
  if (plan.partials_bytes > 0) {
    call.kernels.push_back({.header = kPartialsHeader, .name = partials_kernel_name(spec)});
  }
  return call;
}

}  // namespace

CallPlan plan_call(const CallShape& call, const DeviceInfo& device) {
  return call.backward ? plan_of(backward_args(call), device) : plan_of(forward_args(call), device);
}

}  // namespace fused_op::cuda
