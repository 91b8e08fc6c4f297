// Replaces the kernels of PyTorch's own norms in this process by ours: aten::native_layer_norm,
// aten::_fused_rms_norm and their backward, below PyTorch's autograd. C++ callers therefore get
// them, too. fused_op/_override.py counts the open handles and throws the switch.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace fused_op {

// Register our kernels over PyTorch's, for the CPU and, in a CUDA build, for CUDA; or remove them,
// which leaves the dispatcher as it was. Neither may run while another thread is in an op. Returns
// the names of the ops.
std::vector<std::string> override_torch();
void restore_torch();

// Counts since the process began. For each op: the calls that our kernels took, and those that
// PyTorch's kernels kept, with the reason.
using CallCounts = std::map<std::string, std::int64_t>;
std::pair<CallCounts, CallCounts> override_counts();

}  // namespace fused_op
