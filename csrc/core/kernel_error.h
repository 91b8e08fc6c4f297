#pragma once

#include <stdexcept>

namespace fused_op {

// No kernel is available for a call. PyTorch operations can take it.
struct KernelError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace fused_op
