// What one norm call is, as plain values and pointers: filled by norm.cpp, read by both backends.
// Torch-free. Strides and sizes count elements; a row is dense, rows are `stride` elements apart.
#pragma once

#include <cstdint>

namespace fused_op {

enum class DType : int { kFloat16, kBFloat16, kFloat32, kFloat64 };
enum class NormKind : int { kLayerNorm, kRmsNorm };

// Rows to read. A null `data` means the argument is absent.
struct ConstRows {
  const void* data = nullptr;
  std::int64_t stride = 0;
};

// The allowed pairs (dtype, param_dtype): (f16,f16) (f16,f32) (bf16,bf16) (bf16,f32) (f32,f32)
// (f64,f64). Statistics are f32 (f64 for f64). On the GPU, parameters and what is written begin at
// a multiple of 16 bytes. Rows to read begin at any multiple of the element size.
struct NormForwardArgs {
  NormKind kind = NormKind::kLayerNorm;
  DType dtype = DType::kFloat32;        // of input, residual, output and sum
  DType param_dtype = DType::kFloat32;  // of weight and bias
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  ConstRows input;
  ConstRows residual;            // null: nothing is added
  const void* weight = nullptr;  // [cols], null means 1
  const void* bias = nullptr;    // [cols], null means 0
  void* output = nullptr;        // [rows, cols], dense
  void* sum = nullptr;    // [rows, cols], dense: input + residual; null exactly without residual
  void* stats = nullptr;  // [2, rows] mean and rstd (RMSNorm: [1, rows] rstd); null: not wanted
  double eps = 0;
};

struct NormBackwardArgs {
  NormKind kind = NormKind::kLayerNorm;
  DType dtype = DType::kFloat32;
  DType param_dtype = DType::kFloat32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  ConstRows x;                   // what was normalised: the input, or the sum
  ConstRows grad_output;         // never null
  ConstRows grad_sum;            // what arrives through the sum; null: nothing
  const void* weight = nullptr;  // null means 1
  const void* stats = nullptr;   // as forward wrote them
  void* grad_input = nullptr;    // [rows, cols], dense; null: not wanted
  void* grad_weight = nullptr;   // [cols]; null: not wanted
  void* grad_bias = nullptr;     // [cols]; null: not wanted
  void* workspace = nullptr;     // norm_backward_workspace(args) bytes
};

}  // namespace fused_op
