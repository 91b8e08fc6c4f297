// The forward kernels of the core table for one pair of element types. Included by core_*.cu.
#pragma once

#include <type_traits>
#include <utility>

#include "cuda/core_table.h"
#include "cuda/forward_rows.cuh"

namespace fused_op::cuda {

template <typename Norm, typename X, typename W, bool kRoundsFirst, bool kAdds, int kIndex>
const void* core_forward_kernel() {
  constexpr ForwardPlan kPlan = core_forward_plan(kIndex, kAdds, sizeof(W) > sizeof(X));
  using Source = std::conditional_t<kAdds, AddResidual<X, X, X>, Plain<X>>;
  using Epilogue = std::conditional_t<kRoundsFirst, RoundsFirst<Affine<W, X>, X>, Affine<W, X>>;
  using Op = ForwardOp<Norm, Source, Epilogue, Vectors>;
  using Tile = ForwardTile<kVector<X>, kPlan.lanes, kPlan.vectors, kPlan.ahead, kPlan.few,
                           kPlan.most_threads, kPlan.ctas_per_sm, kPlan.width, kPlan.core>;
  return reinterpret_cast<const void*>(&forward_kernel<Op, Tile>);
}

template <typename Norm, typename X, typename W, bool kRoundsFirst, bool kAdds, int... kTiles>
const void* core_forward_at(int tile, std::integer_sequence<int, kTiles...>) {
  static const void* const kernels[] = {
      core_forward_kernel<Norm, X, W, kRoundsFirst, kAdds, kTiles>()...};
  return kernels[tile];
}

template <typename X, typename W, bool kRoundsFirst>
const void* core_forward_of(NormKind norm, bool adds, int tile) {
  constexpr auto kTiles = std::make_integer_sequence<int, kCoreForwardCount>();
  if constexpr (!kRoundsFirst) {
    if (norm == NormKind::kLayerNorm) {
      return adds ? core_forward_at<LayerNorm, X, W, false, true>(tile, kTiles)
                  : core_forward_at<LayerNorm, X, W, false, false>(tile, kTiles);
    }
  }
  return adds ? core_forward_at<RmsNorm, X, W, kRoundsFirst, true>(tile, kTiles)
              : core_forward_at<RmsNorm, X, W, kRoundsFirst, false>(tile, kTiles);
}

}  // namespace fused_op::cuda
