// Post-norm, addition and pre-norm in one call: its arguments for both backends. Torch-free.
//
//   branch = norm(input) · post_weight, in the dtype of the input
//   sum    = residual + branch, in its own dtype, as it is stored
//   output = norm(sum) · pre_weight
//
// Both norms have the arguments of core/norm_args.h. The branch is never written to memory, unless
// the two norms have to run one after the other.
#pragma once

#include "core/norm_args.h"

namespace fused_op {

// The base is the norm of the sum. Its `input`, the branch, is null, and so is its `output` if only
// the sum is wanted.
struct PostAddPreForwardArgs : NormForwardArgs {
  NormForwardArgs post;  // the norm of the input; its `output` is null
};

}  // namespace fused_op
