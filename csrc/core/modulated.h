// The modulated norms (AdaLN), norm(x)·(1 + scale) + shift, and the gated residual before them,
// residual + gate·input: arguments and formulas for both backends. Torch-free.
//
// scale, shift and gate have one row for each sample, frame or token, or one for the whole call.
// Such a row is called an entry. Neighbouring rows of the input share an entry, the same number of
// rows for each. A kernel finds the entry of row r as it finds rows at two strides (row_split.h):
// the inner stride is 0, and the outer one is the tensor's stride from entry to entry. A chunk of a
// wider projection is therefore read in place.
//
// With n = x̂·weight + bias, and sums over the rows that share an entry:
//
//   dscale = Σ dy·n        dshift = Σ dy        dgate = Σ dr·input
//
// where dr is the gradient of the new residual.
//
// For the rows of one entry, this is an affine norm with weight' = weight·(1 + scale) and bias' =
// bias·(1 + scale) + shift. All gradients follow from those of weight' and bias' of each entry,
// W = Σ dy·x̂ and B = Σ dy:
//
//   dscale = weight·W + bias·B           dshift = B
//   dweight = Σ (1 + scale)·W            dbias = Σ (1 + scale)·B
#pragma once

#include <cstdint>

#include "core/norm_args.h"

namespace fused_op {

// `rows` rows, of which every `rows_each` neighbours share an entry. Entries are `stride` apart.
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
  ConstRows scale;             // rows are entries, as for shift and gate
  ConstRows shift;             // null: none; of the dtype of scale
  ConstRows gate;              // null: none
  std::int64_t rows_each = 1;  // how many rows share an entry
};

// With a gate, base.residual and base.sum are not null.
struct ModulatedForwardArgs : NormForwardArgs {
  Modulation modulation;
};

// With a gate, x is the sum, and grad_input is the gradient of the residual.
struct ModulatedBackwardArgs : NormBackwardArgs {
  Modulation modulation;
  int groups = 0;   // on the GPU: the number of entries, if rows may share them
  Rows grad_scale;  // [entries, cols], as the two below; null: not wanted
  Rows grad_shift;
  Rows grad_gate;
  ConstRows branch;  // what the gate multiplied
  Rows grad_branch;
};

}  // namespace fused_op
