// The entry of the CPU backend: the same arguments as CUDA, for a range of rows, chunks or columns.
// It starts no threads; backend.cpp splits the ranges. Results depend neither on the split nor on
// the level.
#pragma once

#include <cstddef>

#include "core/norm_args.h"
#include "core/post_add_pre.h"
#include "cpu/level.h"

namespace fused_op::cpu {

// The level of that name. Null if there is none, or if this CPU lacks its instructions. Without a
// name, the best level for this CPU.
const Level* find_level(const char* name);

// Forward of a range of rows with its output in 8 bits. The unquantised output may be null.
void norm_quantized(const Level& level, const NormForwardArgs& args,
                    const Quantization& quantization, std::int64_t first_row,
                    std::int64_t last_row);

// Two norms, or a norm and an addition, for a range of rows, a few rows at a time.
void post_add_pre_forward(const Level& level, const PostAddPreForwardArgs& args,
                          std::int64_t first_row, std::int64_t last_row);

// Backward has two steps: first the row chunks, in any order and on any thread; each writes its
// gradient rows, and its own partial sums into the workspace. Then the columns, which add up the
// partial sums in chunk order.
struct BackwardWork {
  std::int64_t chunks;      // depends only on the shape
  std::int64_t cols;        // with partial sums; 0: none
  std::int64_t chunk_sums;  // partial sums of a chunk in the workspace
  std::int64_t chunk_elements;

  std::size_t workspace_bytes(DType dtype) const {
    return static_cast<std::size_t>(chunks * chunk_sums) *
           (dtype == DType::kFloat64 ? sizeof(double) : sizeof(float));
  }
};
BackwardWork backward_work(const NormBackwardArgs& args, const Variant* variant);
std::int64_t norm_backward_chunks(const NormBackwardArgs& args);

// Tiles of pixels, and chunks of them.
std::int64_t channels_first_tiles(std::int64_t rows, std::int64_t pixels);
BackwardWork channels_first_work(const ChannelsFirstBackwardArgs& args);

}  // namespace fused_op::cpu
