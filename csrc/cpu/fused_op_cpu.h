// The CPU backend's door: the same arguments as CUDA, over a range of rows, chunks or columns. It
// starts no threads of its own: backend.cpp splits the ranges. Results depend neither on how they
// are split nor on the level.
#pragma once

#include <cstddef>

#include "core/norm_args.h"
#include "core/post_add_pre.h"
#include "cpu/level.h"

namespace fused_op::cpu {

// The level of that name, or null: it is none, or this CPU lacks its instructions. Without a name:
// the best that this CPU has.
const Level* find_level(const char* name);

// Forward of a range of rows, and its output in 8 bits; the output itself may be null.
void norm_quantized(const Level& level, const NormForwardArgs& args,
                    const Quantization& quantization, std::int64_t first_row,
                    std::int64_t last_row);

// Two norms of a range of rows, or a norm and an addition, a few rows at a time.
void post_add_pre_forward(const Level& level, const PostAddPreForwardArgs& args,
                          std::int64_t first_row, std::int64_t last_row);

// Backward takes two steps: the row chunks (any order, any thread; each writes its gradient rows
// and its own partial sums into the workspace), then the columns (sums the partials in chunk
// order).
struct BackwardWork {
  std::int64_t chunks;      // a function of the shape
  std::int64_t cols;        // with partial sums; 0: none
  std::int64_t chunk_sums;  // of a chunk, in the workspace
  std::int64_t chunk_elements;

  std::size_t workspace_bytes(DType dtype) const {
    return static_cast<std::size_t>(chunks * chunk_sums) *
           (dtype == DType::kFloat64 ? sizeof(double) : sizeof(float));
  }
};
BackwardWork backward_work(const NormBackwardArgs& args, const Variant* variant);
std::int64_t norm_backward_chunks(const NormBackwardArgs& args);

}  // namespace fused_op::cpu
