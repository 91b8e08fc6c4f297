// Where the row that is normalised comes from, for calls of one dtype, which dispatch.h chooses.
// Dropout and tensors of several dtypes: flexible_rows.h. The GPU's: core/source.h. Torch-free.
#pragma once

#include "core/norm_args.h"
#include "core/pack.h"

namespace fused_op::cpu {

template <typename T>
const T* row_of(const ConstRows& rows, std::int64_t row) {
  return static_cast<const T*>(rows.data) + rows.split.offset(row, rows.stride);
}

// The row is the input.
template <typename T>
struct Plain {
  using Element = T;
  static constexpr bool kAdds = false;

  const T* input;

  Plain(const NormForwardArgs& args, std::int64_t row) : input(row_of<T>(args.input, row)) {}

  // Stores N columns from `col` on where row() points; the input is there already.
  template <int N>
  void finish(std::int64_t, std::int64_t) const {}

  const T* row() const { return input; }
};

// The row is input + residual, rounded to T and stored as the new residual: the statistics are
// those of the stored sum, so that backward, which reads it, finds the same normalised values.
template <typename T>
struct AddResidual {
  using Element = T;
  static constexpr bool kAdds = true;  // backward adds what arrives through the sum

  const T* input;
  const T* residual;
  T* sum;

  AddResidual(const NormForwardArgs& args, std::int64_t row)
      : input(row_of<T>(args.input, row)),
        residual(row_of<T>(args.residual, row)),
        sum(static_cast<T*>(args.sum) + row * args.cols) {}

  template <int N>
  void finish(std::int64_t col, std::int64_t width) const {
    Accumulator<T> total[N], addend[N];
    unpack(ByteAccess::load<N>(input, col, width), total);
    unpack(ByteAccess::load<N>(residual, col, width), addend);
    for (int j = 0; j < N; ++j) {
      total[j] += addend[j];
    }
    ByteAccess::store(sum, col, width, pack_from<T, N>(total));
  }
  const T* row() const { return sum; }
};

}  // namespace fused_op::cpu
