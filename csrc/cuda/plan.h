// How a call lies over the GPU: plain integers, made once for workspace and launch. Host code
// without CUDA or torch, so that every plan can be made, printed and checked on any machine.
//
// Which lane has an element depends on the row's length and the element types alone. Rows, the
// device and addresses choose only what leaves the order of sums as it is: how many rows share a
// CTA, how many warps share what one would hold, and whether rows move by vectors or by words.
#pragma once

#include <cstdint>
#include <string>

#include "core/norm_args.h"
#include "cuda/device_info.h"

namespace fused_op::cuda {

// What the kernels of a plan are compiled from.
constexpr const char* kForwardHeader = "cuda/forward_rows.cuh";
constexpr const char* kBackwardHeader = "cuda/backward_rows.cuh";
constexpr const char* kPartialsHeader = "cuda/add_partials.cuh";

// What a forward call computes, as types.
struct ForwardSpec {
  NormKind norm;
  bool adds;     // a residual, to the row
  bool dropout;  // of the input if `adds`, else of the output
  bool split;    // rows at two strides
  DType input;
  DType residual;
  DType row;  // of what is normalised: the input, or the sum
  DType parameters;
  DType output;
};
ForwardSpec spec_of(const NormForwardArgs& args);

// The arguments of ForwardTile (forward_rows.cuh), in its order, and the launch.
struct ForwardPlan {
  int pack;     // elements that a lane takes at a time
  int lanes;    // of a row; 32: as many warps as the row needs
  int vectors;  // packs of a lane
  int spread;   // warps that share what one would hold
  int ahead;    // packs of parameters in flight
  bool few;     // all rows are on the GPU at once
  int threads;  // of a CTA
  int ctas_per_sm;
  int width;  // a constant of the kernel

  bool words;  // rows move by words: their addresses or their length do not allow vectors
  std::int64_t ctas;
};

// Whether a call's kernel was compiled with the extension.
bool is_core(const ForwardSpec& spec, std::int64_t cols);

// Columns up to which a row fits into the registers of a CTA.
std::int64_t most_forward_cols(const ForwardSpec& spec);

// Whether a call's kernel is compiled at first use.
bool has_plan(const ForwardSpec& spec, std::int64_t cols);

// `aligned`: every row begins where vectors of its type may.
ForwardPlan plan_forward(const ForwardSpec& spec, std::int64_t rows, std::int64_t cols,
                         bool aligned, const DeviceInfo& device);

// Whether every row of the arguments begins at a multiple of the bytes of one of its packs.
bool rows_aligned(const NormForwardArgs& args, const ForwardSpec& spec);

// The kernel's name in C++.
std::string kernel_name(const ForwardSpec& spec, const ForwardPlan& plan);

// What a backward call computes, as types.
struct BackwardSpec {
  NormKind norm;
  bool adds;          // gradients leave for a residual, and what arrives through the sum is added
  bool drops_input;   // dropout of the input, before the residual was added
  bool drops_output;  // dropout of the output
  bool recovers;      // x̂ from the output
  bool split;         // rows at two strides
  DType input;        // of grad_input
  DType residual;     // of grad_residual
  DType row;          // of x, unless it is recovered
  DType parameters;
  DType grad_output;
};
BackwardSpec spec_of(const NormBackwardArgs& args);

// How rows move: Vectors, Words and WholeWords of access.cuh.
enum class Move : int { kVectors, kWords, kWholeWords };

// The arguments of BackwardTile (backward_tile.h), in its order, and the launch.
struct BackwardPlan {
  int pack;
  int lanes;
  int vectors;
  int most_threads;  // of a CTA
  int ctas_per_sm;
  int stages;
  int keep;
  bool parameters_stay;
  bool stats_ahead;
  int width;  // a constant of the kernel

  Move move;
  int row_threads;
  int side_by_side;   // rows of a CTA
  std::int64_t ctas;  // and rows of partial sums
  std::int64_t shared_bytes;
  std::int64_t partials_bytes;  // 0: one CTA, whose sums are the gradients
};

// The plan of a call whose rows fit into a CTA; `lanes` is 0 if they do not. wants_sums: of the
// parameters' gradients; adds_sums: to what is there.
BackwardPlan plan_backward(const BackwardSpec& spec, std::int64_t rows, std::int64_t cols,
                           Move most_aligned, bool wants_sums, bool adds_sums,
                           const DeviceInfo& device);
Move most_aligned(const NormBackwardArgs& args, const BackwardSpec& spec);

// The same of a whole call; `lanes` is 0 also where its kernel was compiled with the extension.
BackwardPlan plan_backward(const NormBackwardArgs& args, const BackwardSpec& spec,
                           const DeviceInfo& device);

std::string kernel_name(const BackwardSpec& spec, const BackwardPlan& plan);
// Of the kernel that adds the partial sums.
std::string partials_kernel_name(const BackwardSpec& spec);

}  // namespace fused_op::cuda
