// The backward kernels of the core table for one pair of element types. Included by core_*.cu.
#pragma once

#include <type_traits>
#include <utility>

#include "cuda/add_partials.cuh"
#include "cuda/backward_rows.cuh"
#include "cuda/core_table.h"

namespace fused_op::cuda {

template <typename Norm, typename X, typename W, bool kRoundsFirst, bool kAdds, int kIndex>
const void* core_backward_kernel() {
  constexpr BackwardPlan kPlan = core_backward_plan(kIndex, static_cast<int>(sizeof(X)), kAdds);
  using Source = std::conditional_t<kAdds, AddResidual<X, X, X>, Plain<X>>;
  using Epilogue = std::conditional_t<kRoundsFirst, RoundsFirst<Affine<W, X>, X>, Affine<W, X>>;
  using Op = BackwardOp<Norm, Source, Epilogue, Vectors>;
  using Tile =
      BackwardTile<kPlan.pack, kPlan.lanes, kPlan.vectors, kPlan.most_threads, kPlan.ctas_per_sm,
                   kPlan.stages, kPlan.keep, kPlan.parameters_stay, false, kPlan.width, kPlan.core>;
  return reinterpret_cast<const void*>(&backward_kernel<Op, Tile>);
}

template <typename Norm, typename X, typename W, bool kRoundsFirst, bool kAdds, int kFirst,
          int... kTiles>
const void* core_backward_at(int tile, std::integer_sequence<int, kTiles...>) {
  static const void* const kernels[] = {
      core_backward_kernel<Norm, X, W, kRoundsFirst, kAdds, kFirst + kTiles>()...};
  return kernels[tile - kFirst];
}

template <typename X, typename W, bool kRoundsFirst>
const void* core_backward_of(NormKind norm, bool adds, int tile) {
  constexpr auto kAll = std::make_integer_sequence<int, kCoreBackwardCount>();
  constexpr auto kSome = std::make_integer_sequence<int, kCoreBackwardCount - kFirstWithSum>();
  if constexpr (!kRoundsFirst) {
    if (norm == NormKind::kLayerNorm) {
      return adds ? core_backward_at<LayerNorm, X, W, false, true, kFirstWithSum>(tile, kSome)
                  : core_backward_at<LayerNorm, X, W, false, false, 0>(tile, kAll);
    }
  }
  return adds ? core_backward_at<RmsNorm, X, W, kRoundsFirst, true, kFirstWithSum>(tile, kSome)
              : core_backward_at<RmsNorm, X, W, kRoundsFirst, false, 0>(tile, kAll);
}

template <typename W>
const void* core_partials_of() {
  return reinterpret_cast<const void*>(&add_partials_kernel<W, float>);
}

}  // namespace fused_op::cuda
