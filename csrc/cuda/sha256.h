// SHA-256 (FIPS 180-4), which names and checks the files of kernels. Host code without CUDA or
// torch.
#pragma once

#include <string>
#include <string_view>

namespace fused_op::cuda {

// In hexadecimal digits, 64 of them.
std::string sha256(std::string_view text);

}  // namespace fused_op::cuda
