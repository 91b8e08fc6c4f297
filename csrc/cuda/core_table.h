// The core table: kernels that are compiled with the extension, for the calls that most models
// make. These calls need no compiler at run time. A kernel takes rows of any width that fills its
// tile, and gives the bits of a kernel compiled for that width. Host code without torch.
#pragma once

#include <algorithm>
#include <iterator>

#include "cuda/backward_tile.h"
#include "cuda/plan.h"

namespace fused_op::cuda {

// Whether the table has the kernels of a norm. Of those that round x̂ before the weight, it has
// only the ones that most language models call.
constexpr bool core_has(NormKind norm, bool rounds_first, DType row, DType parameters) {
  return (norm == NormKind::kLayerNorm || norm == NormKind::kRmsNorm) &&
         (!rounds_first ||
          (norm == NormKind::kRmsNorm && row == DType::kBFloat16 && parameters == row));
}

// How a forward kernel of the table lays a row over threads.
struct CoreForwardTile {
  int lanes;    // of a row; 32: as many warps as the row needs
  int vectors;  // of a lane
  bool few;
};
constexpr CoreForwardTile kCoreForwardTiles[] = {
    {2, 2, false},  {4, 2, false}, {4, 4, false}, {8, 4, false}, {16, 4, false}, {32, 3, false},
    {32, 4, false}, {4, 4, true},  {8, 4, true},  {16, 4, true}, {32, 3, true},  {32, 4, true},
};
constexpr int kCoreForwardCount = static_cast<int>(std::size(kCoreForwardTiles));

// The part of a plan that follows from the tile. `more`: with a residual; `wide`: parameters wider
// than the rows.
constexpr ForwardPlan core_forward_plan(int tile, bool more, bool wide) {
  const CoreForwardTile& of = kCoreForwardTiles[tile];
  ForwardPlan plan{};
  plan.lanes = of.lanes;
  plan.vectors = of.vectors;
  plan.core = true;
  plan.few = of.few;
  plan.ahead = of.few ? of.vectors : of.vectors == 2 || wide ? 1 : 2;
  plan.most_threads = of.lanes < 32 ? 128 : 512;
  // 768 threads on an SM reach 1.00 of a copy, 1024 threads 0.98 (16384x4096, RMSNorm with a
  // residual, bf16, H200).
  const int sm_threads = of.vectors == 2 ? (more || wide ? 1024 : 1536) : more ? 768 : 1024;
  plan.ctas_per_sm = of.few ? 1 : std::max(sm_threads / plan.most_threads, 1);
  return plan;
}

// How a backward kernel of the table lays a row over threads, in vectors of 16 bytes.
struct CoreBackwardTile {
  int lanes;    // of a row; 32: as many warps as the row needs
  int vectors;  // of a lane
  int stages;
};
constexpr CoreBackwardTile kCoreBackwardTiles[] = {
    {8, 1, 3}, {8, 2, 2}, {8, 2, 3}, {16, 2, 2}, {16, 2, 3}, {32, 2, 2}, {32, 2, 3},
};
constexpr int kCoreBackwardCount = static_cast<int>(std::size(kCoreBackwardTiles));
constexpr int kFirstWithSum = 5;  // the first tile that also takes the gradient of a sum

// The part of a plan that follows from the tile, for elements of `size` bytes. `adds`: with the
// gradient of a sum.
constexpr BackwardPlan core_backward_plan(int tile, int size, bool adds) {
  const CoreBackwardTile& of = kCoreBackwardTiles[tile];
  BackwardPlan plan{};
  plan.pack = kVectorBytes / size;
  plan.lanes = of.lanes;
  plan.vectors = of.vectors;
  plan.core = true;
  plan.stages = of.stages;
  plan.most_threads = of.vectors == 1 ? 256 : 512;
  plan.ctas_per_sm = of.vectors > 1 ? 1 : adds ? 2 : 3;
  plan.keep = true;
  plan.parameters_stay = of.vectors == 1;
  return plan;
}

// The kernel of a plan with `core` set, and the kernel that adds partial sums, for cudaGetKernel.
// Null if the table does not have it; then NVRTC compiles it.
#ifndef FUSED_OP_NO_CORE_TABLE
constexpr bool kHasCoreTable = true;
const void* core_forward(const ForwardSpec& spec, const ForwardPlan& plan);
const void* core_backward(const BackwardSpec& spec, const BackwardPlan& plan);
const void* core_partials(const BackwardSpec& spec);
#else  // a build without nvcc
constexpr bool kHasCoreTable = false;
inline const void* core_forward(const ForwardSpec&, const ForwardPlan&) { return nullptr; }
inline const void* core_backward(const BackwardSpec&, const BackwardPlan&) { return nullptr; }
inline const void* core_partials(const BackwardSpec&) { return nullptr; }
#endif

// The same for one pair of element types, of rows and of parameters (core_*.cu).
template <typename X, typename W, bool kRoundsFirst = false>
const void* core_forward_of(NormKind norm, bool adds, int tile);
template <typename X, typename W, bool kRoundsFirst = false>
const void* core_backward_of(NormKind norm, bool adds, int tile);
template <typename W>
const void* core_partials_of();

}  // namespace fused_op::cuda
