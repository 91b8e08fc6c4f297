// SHA-256 (FIPS 180-4), which names and checks the files of kernels. Host code without CUDA or
// torch.
#pragma once

#include <string>
#include <string_view>

namespace fused_op::cuda {

// As 64 hexadecimal digits.
std::string sha256(std::string_view text);

}  // namespace fused_op::cuda
