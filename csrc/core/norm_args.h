// One norm call as plain values and pointers: the op layer fills it in, both backends read it.
// Torch-free. Strides and sizes count elements; a row is dense.
#pragma once

#include <cstdint>

#include "core/dropout.h"
#include "core/row_split.h"

namespace fused_op {

enum class DType : int { kFloat16, kBFloat16, kFloat32, kFloat64 };
// kIdentity: the row itself, which a gate multiplies; only in backward on the GPU.
enum class NormKind : int { kLayerNorm, kRmsNorm, kL2Norm, kBiasedRmsNorm, kIdentity };
// Where values are rounded to 16 bits: only at the output, or also at x̂, to the dtype of the
// input. Backward takes the rounding of x̂ for the identity; the gradient of the weight uses the
// rounded x̂.
enum class Rounding : int { kOnce, kBeforeWeight };

FUSED_OP_HD constexpr int size_of(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

// The longest rows that the GPU reads at two strides.
constexpr int kMaxSplitBytes = 512;

// Rows to read. A null `data` means the argument is absent.
struct ConstRows {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t stride = 0;  // from one row to the next
  RowSplit split = {};      // where the second stride applies
};

// Rows to write, contiguous. Null: not wanted.
struct Rows {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
};

// Each tensor has a dtype of its own, but f64 goes only with f64. Statistics are f32 (f64 for f64).
// On the GPU, parameters and everything written begin at a multiple of 16 bytes. Rows to read begin
// at any multiple of the element size. On the GPU, rows at two strides are whole vectors of 16
// bytes, no longer than kMaxSplitBytes, and have no residual.
struct NormForwardArgs {
  NormKind kind = NormKind::kLayerNorm;
  DType dtype = DType::kFloat32;        // of the values that are normalised: the input or the sum
  DType param_dtype = DType::kFloat32;  // of weight and bias
  Rounding rounding = Rounding::kOnce;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  ConstRows input;
  ConstRows residual;            // null: nothing is added
  const void* weight = nullptr;  // [cols], null means 1
  const void* bias = nullptr;    // [cols], null means 0
  Rows output;
  void* sum = nullptr;    // [rows, cols], contiguous: input + residual; null without a residual
  void* stats = nullptr;  // [2, rows] mean and rstd (RMSNorm: [1, rows] rstd); null: not wanted
  double eps = 0;
  Dropout dropout;  // of the input if there is a residual, else of the output
};

struct NormBackwardArgs {
  NormKind kind = NormKind::kLayerNorm;
  DType dtype = DType::kFloat32;  // of x
  DType param_dtype = DType::kFloat32;
  Rounding rounding = Rounding::kOnce;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  ConstRows x;                   // what was normalised: the input, or the sum
  ConstRows grad_output;         // never null
  ConstRows grad_sum;            // the gradient that arrives at the sum; null: none
  const void* weight = nullptr;  // null means 1
  const void* bias = nullptr;    // read if x_is_output; null means 0
  const void* stats = nullptr;   // as forward wrote them
  bool has_residual = false;     // forward added one
  Rows grad_input;               // its dtype is set even if it is not wanted, as for grad_residual
  Rows grad_residual;            // null: it is the same as grad_input, or not wanted
  void* grad_weight = nullptr;   // [cols]; null: not wanted
  void* grad_bias = nullptr;     // [cols]; null: not wanted
  bool add_grads = false;        // add to grad_weight and grad_bias, which are f32
  bool x_is_output = false;      // x holds the output: x̂ = (x - bias) / weight
  void* workspace = nullptr;     // norm_backward_workspace(args) bytes
  Dropout dropout;               // as in forward; applied to the input if drops_input
  bool drops_input = false;

  bool wants_sums() const { return grad_weight != nullptr || grad_bias != nullptr; }
};

// The number of parameter gradients: the weight's, and the bias's if the norm can have one.
constexpr int grads_of(NormKind kind) {
  return kind == NormKind::kLayerNorm || kind == NormKind::kBiasedRmsNorm ? 2 : 1;
}

// Whether x̂ is rounded before the weight. In 32 bits and more there is nothing to round.
inline bool rounds_first(Rounding rounding, DType input) {
  return rounding == Rounding::kBeforeWeight && size_of(input) == 2;
}

// Whether the GPU's core table has kernels for these parameters beside rows of `dtype`.
inline bool is_tuned_pair(DType dtype, DType param_dtype) {
  return param_dtype == dtype || (param_dtype == DType::kFloat32 && size_of(dtype) == 2);
}

}  // namespace fused_op
