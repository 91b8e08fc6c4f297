// Which kernels quantise the output of a forward. Host code without CUDA or torch.
#include <bit>

#include "cuda/plan.h"
#include "cuda/plan_grid.h"
#include "cuda/plan_names.h"

namespace fused_op::cuda {
namespace {

std::string rule_name(const QuantizeRule& rule) {
  const auto index = [](auto value) { return number(static_cast<int>(value)); };
  return "fused_op::cuda::QuantizeAs" + joined({index(rule.format), index(rule.convention),
                                                index(rule.scheme), flag(rule.power_of_two)});
}

}  // namespace

std::string quantized_kernel_name(const ForwardSpec& spec, const ForwardPlan& plan,
                                  const QuantizeRule& rule) {
  const std::string op = joined({op_name(spec, plan.words), rule_name(rule)});
  return "fused_op::cuda::forward_kernel" +
         joined({"fused_op::cuda::QuantizedOp" + op, tile_name(plan)});
}

std::string quantize_rows_kernel_name(DType output, const QuantizeRule& rule) {
  return "fused_op::cuda::quantize_rows_kernel" + joined({type(output), rule_name(rule)});
}

bool quantizes_in_registers(const NormForwardArgs& args) {
  const ForwardSpec spec = spec_of(args);
  if (args.cols > most_forward_cols(spec) || by_words(spec, args.cols)) {
    return false;
  }
  // Blocks of 128 columns have to be whole packs of the lanes.
  const auto lanes = static_cast<unsigned>(grid_of(spec, args.cols).lanes);
  return std::has_single_bit(lanes) && places_of(args, spec).aligned;
}

}  // namespace fused_op::cuda
