// The modulated norms (AdaLN), norm(x)·(1 + scale) + shift, and the gated residual before them,
// residual + gate·input: their arguments and formulas for both backends. Torch-free.
//
// Rows that share an entry. scale, shift and gate have one row for each sample, frame or token, or
// one for the whole call. Such a row is an entry. Neighbouring rows of the input share it, the same
// number for each entry. A kernel finds the entry of row r as it finds rows at two strides
// (row_split.h): the inner stride is 0, and the outer one, from entry to entry, is that of the
// tensor. So a chunk of a wider projection is read in place.
//
// With n = x̂·weight + bias, and sums over the rows that share an entry:
//
//   dscale = Σ dy·n        dshift = Σ dy        dgate = Σ dr·input, dr being that of the new
//   residual
//
// For the rows of an entry this is an affine norm with weight' = weight·(1 + scale) and bias' =
// bias·(1 + scale) + shift. All gradients follow from those of an entry's weight' and bias',
// W = Σ dy·x̂ and B = Σ dy:
//
//   dscale = weight·W + bias·B    dshift = B    dweight = Σ (1 + scale)·W    dbias = Σ (1 +
//   scale)·B
#pragma once

#include <cstdint>

#include "core/norm_args.h"

namespace fused_op {

// `rows_each` neighbours of `rows` rows share one of the entries, which are `stride` apart.
inline ConstRows entries(const void* data, DType dtype, std::int64_t stride, std::int64_t rows_each,
                         std::int64_t rows) {
  ConstRows made{data, dtype, 0, {}};
  if (rows_each == 1) {
    made.stride = stride;
  } else if (rows_each < rows) {
    made.split = RowSplit(static_cast<std::uint32_t>(rows_each), stride);
  }
  return made;
}

struct Modulation {
  ConstRows scale;             // entries, as all of these
  ConstRows shift;             // null: none; of the dtype of scale
  ConstRows gate;              // null: none
  std::int64_t rows_each = 1;  // rows that share an entry
};

// With a gate, base.residual and base.sum are there.
struct ModulatedForwardArgs : NormForwardArgs {
  Modulation modulation;
};

// With a gate, x is the sum, and grad_input is the gradient of the residual.
struct ModulatedBackwardArgs : NormBackwardArgs {
  Modulation modulation;
  int groups = 1;   // entries that rows share, on the GPU
  Rows grad_scale;  // [entries, cols], as the two below; null: not wanted
  Rows grad_shift;
  Rows grad_gate;
  ConstRows branch;  // what the gate multiplied
  Rows grad_branch;
};

}  // namespace fused_op
