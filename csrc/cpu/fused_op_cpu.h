// The CPU backend's door: the same arguments as CUDA, over a range of rows, chunks or columns. It
// starts no threads of its own: backend.cpp splits the ranges. Results depend neither on how they
// are split nor on the level.
#pragma once

#include <cstddef>

#include "core/norm_args.h"
#include "cpu/level.h"

namespace fused_op::cpu {

// The level of that name, or null: it is none, or this CPU lacks its instructions. Without a name:
// the best that this CPU has.
const Level* find_level(const char* name);

// Backward takes two steps: the row chunks (any order, any thread; each writes its gradient rows
// and its own partial sums into the workspace), then the columns (sums the partials in chunk
// order).
std::size_t norm_backward_workspace(const NormBackwardArgs& args);  // bytes; 0: no partials
std::int64_t norm_backward_chunks(const NormBackwardArgs& args);    // a function of the shape

}  // namespace fused_op::cpu
