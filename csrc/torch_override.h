// PyTorch's own norms of this process, by our kernels: aten::native_layer_norm and
// aten::_fused_rms_norm, and their backward, below PyTorch's autograd. C++ callers come here too.
// fused_op/_override.py counts who wants it, and switches.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace fused_op {

// Register our kernels over those of PyTorch, for the CPU and, in a build with it, for CUDA; take
// them off again, and the dispatcher is as it was. Neither while another thread is in an op.
// Returns the names of the ops.
std::vector<std::string> override_torch();
void restore_torch();

// Since the process began: per op, the calls that our kernels took, and those that PyTorch's kept,
// each with its reason.
using CallCounts = std::map<std::string, std::int64_t>;
std::pair<CallCounts, CallCounts> override_counts();

}  // namespace fused_op
