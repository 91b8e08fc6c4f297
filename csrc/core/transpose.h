// The arguments of a copy of matrices that exchanges rows and columns: images whose channels are
// neighbours become planes, and planes such images. Torch-free.
#pragma once

#include <cstdint>

namespace fused_op {

struct TransposeArgs {
  const void* from = nullptr;  // [matrices, rows, cols], contiguous; none of these is 0
  void* to = nullptr;          // [matrices, cols, rows], likewise
  int element_bytes = 0;       // 2, 4 or 8
  std::int64_t matrices = 0;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
};

}  // namespace fused_op
