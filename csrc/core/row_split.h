// Rows at two strides, such as the heads of a packed [batch, seq, 3, heads, head_dim] tensor: after
// each `inner` rows, an outer stride takes over. Torch-free.
#pragma once

#include <cstdint>

#include "core/pack.h"

namespace fused_op {

// Divides row numbers below 2^31 by `inner` with a multiplication, an addition and a shift. Source:
// Granlund & Montgomery 1994, "Division by invariant integers using multiplication".
struct RowSplit {
  std::uint32_t inner = 0;  // 0: not split
  std::uint32_t magic = 0;
  std::uint32_t shift = 0;
  std::int64_t outer_stride = 0;

  RowSplit() = default;
  RowSplit(std::uint32_t inner_rows, std::int64_t stride)
      : inner(inner_rows), outer_stride(stride) {
    while ((std::uint64_t{1} << shift) < inner) {
      ++shift;
    }
    magic = static_cast<std::uint32_t>(
        ((std::uint64_t{1} << 32) * ((std::uint64_t{1} << shift) - inner)) / inner + 1);
  }

  // The offset of a row from the first one, in elements.
  FUSED_OP_HD std::int64_t offset(std::int64_t row, std::int64_t stride) const {
    if (inner == 0) {
      return row * stride;
    }
    const auto number = static_cast<std::uint32_t>(row);
    const auto product = static_cast<std::uint32_t>((std::uint64_t{number} * magic) >> 32);
    const std::uint32_t outer = (product + number) >> shift;
    return outer * outer_stride + (number - outer * inner) * stride;
  }
};

}  // namespace fused_op
