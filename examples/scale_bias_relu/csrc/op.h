// One call as plain values and pointers, the formula, and the CPU backend's functions. Both
// backends and the binding include it. Torch-free, so that plain nvcc compiles kernel.cu in
// seconds.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__ __forceinline__
#else
#define HOST_DEVICE inline
#endif

namespace scale_bias_relu {

enum class DType { kFloat16, kBFloat16, kFloat32, kFloat64 };

struct ForwardArgs {
  DType dtype;  // of every tensor
  std::int64_t rows;
  std::int64_t cols;
  double scale;
  const void* input;  // [rows, cols], dense
  const void* bias;   // [cols]; null: none
  void* output;       // [rows, cols]
};

struct BackwardArgs {
  DType dtype;
  std::int64_t rows;
  std::int64_t cols;
  double scale;
  const void* grad_output;  // [rows, cols]
  const void* output;       // [rows, cols], as forward returned it
  void* grad_input;         // [rows, cols]; null: not wanted
  void* grad_bias;          // [cols]; null: not wanted
  void* partials;           // [parts, cols] of Accumulator, scratch; null without grad_bias
  std::int64_t parts;       // what the backend's backward_parts returned
};

// Elements are converted on load and on store; what is between has this type.
template <typename T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <typename T>
using Accumulator = typename AccumulatorOf<T>::type;

// "<= 0 ? 0" and not "max(0, ...)": the comparison is false for NaN, which stays NaN, as in torch.
template <typename A>
HOST_DEVICE A scale_bias_relu(A x, A scale, A bias) {
  const A y = x * scale + bias;
  return y <= A(0) ? A(0) : y;
}

// The gradient before the relu. The sign of the output says what the relu did: nothing else has to
// be kept for backward.
template <typename A>
HOST_DEVICE A through_relu(A dy, A y) {
  return y <= A(0) ? A(0) : dy;
}

// Calls function.operator()<T>(). Types names the 16-bit types of a backend.
template <typename Types, typename Function>
auto with_dtype(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kFloat16:
      return function.template operator()<typename Types::Float16>();
    case DType::kBFloat16:
      return function.template operator()<typename Types::BFloat16>();
    case DType::kFloat32:
      return function.template operator()<float>();
    case DType::kFloat64:
      break;
  }
  return function.template operator()<double>();
}

// Each works on a range, so that the binding can spread ranges over threads.
namespace cpu {
void forward(const ForwardArgs& args, std::int64_t first_row, std::int64_t last_row);
std::int64_t backward_parts(std::int64_t rows);
void backward(const BackwardArgs& args, std::int64_t first_part, std::int64_t last_part);
void finish_grad_bias(const BackwardArgs& args, std::int64_t first_col, std::int64_t last_col);
}  // namespace cpu

}  // namespace scale_bias_relu
