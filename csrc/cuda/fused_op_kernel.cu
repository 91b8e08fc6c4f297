// The core table: finds the kernel of a plan among those compiled with the extension, in core_*.cu.
// The kernels themselves, in reading order: fused_op_kernel.cuh. Torch-free.
#include "core/pack.h"
#include "cuda/core_table.h"

namespace fused_op::cuda {
namespace {

// Calls `function` with the types of rows and parameters, which are in the table.
template <typename Function>
const void* with_types(DType row, DType parameters, Function&& function) {
  const bool same = row == parameters;
  if (row == DType::kFloat16) {
    return same ? function.template operator()<Float16, Float16>()
                : function.template operator()<Float16, float>();
  }
  if (row == DType::kBFloat16) {
    return same ? function.template operator()<BFloat16, BFloat16>()
                : function.template operator()<BFloat16, float>();
  }
  return function.template operator()<float, float>();
}

}  // namespace

const void* core_forward(const ForwardSpec& spec, const ForwardPlan& plan) {
  int tile = 0;
  while (kCoreForwardTiles[tile].lanes != plan.lanes ||
         kCoreForwardTiles[tile].vectors != plan.vectors ||
         kCoreForwardTiles[tile].few != plan.few) {
    ++tile;
  }
  if (spec.rounds_first) {
    return core_forward_of<BFloat16, BFloat16, true>(spec.norm, spec.adds, tile);
  }
  return with_types(spec.row, spec.parameters, [&]<typename X, typename W>() {
    return core_forward_of<X, W>(spec.norm, spec.adds, tile);
  });
}

const void* core_backward(const BackwardSpec& spec, const BackwardPlan& plan) {
  int tile = 0;
  while (kCoreBackwardTiles[tile].lanes != plan.lanes ||
         kCoreBackwardTiles[tile].vectors != plan.vectors ||
         kCoreBackwardTiles[tile].stages != plan.stages) {
    ++tile;
  }
  if (spec.rounds_first) {
    return core_backward_of<BFloat16, BFloat16, true>(spec.norm, spec.adds, tile);
  }
  return with_types(spec.row, spec.parameters, [&]<typename X, typename W>() {
    return core_backward_of<X, W>(spec.norm, spec.adds, tile);
  });
}

const void* core_partials(const BackwardSpec& spec) {
  if (spec.row == DType::kFloat64) {
    return nullptr;
  }
  return with_types(spec.parameters, spec.parameters,
                    [&]<typename, typename W>() { return core_partials_of<W>(); });
}

}  // namespace fused_op::cuda
