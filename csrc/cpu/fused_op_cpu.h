// The CPU backend's door: the same arguments as CUDA, over a range of rows or columns. It starts no
// threads of its own: backend.cpp splits the ranges. Results do not depend on how they are split.
#pragma once

#include <cstddef>

#include "core/norm_args.h"

namespace fused_op::cpu {

void norm_forward(const NormForwardArgs& args, std::int64_t first_row, std::int64_t last_row);

// Backward takes two steps: the row chunks (any order, any thread; each writes its gradient rows
// and its own partial sums into the workspace), then the columns (sums the partials in chunk
// order).
std::size_t norm_backward_workspace(const NormBackwardArgs& args);  // bytes; 0: no partials
std::int64_t norm_backward_chunks(const NormBackwardArgs& args);    // a function of the shape
void norm_backward_rows(const NormBackwardArgs& args, std::int64_t first_chunk,
                        std::int64_t last_chunk);
void norm_backward_columns(const NormBackwardArgs& args, std::int64_t first_col,
                           std::int64_t last_col);

}  // namespace fused_op::cpu
