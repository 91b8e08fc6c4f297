// Post-norm, addition and pre-norm in one call: its arguments for both backends. Torch-free.
//
//   branch = norm(input) · post_weight, in the dtype of the input
//   sum    = residual + branch, in its own dtype, as it is stored
//   output = norm(sum) · pre_weight
//
// Both norms are those of core/norm_args.h, and have its arguments. What goes from one to the other
// is nowhere in memory, unless the two have to run one after the other.
#pragma once

#include "core/norm_args.h"

namespace fused_op {

// The base is the norm of the sum; its `input`, the branch, is null. So is its `output` where the
// sum alone is wanted.
struct PostAddPreForwardArgs : NormForwardArgs {
  NormForwardArgs post;  // the norm of the input; its `output` is null
};

}  // namespace fused_op
