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

namespace template_op {

enum class DType { kFloat16, kBFloat16, kFloat32, kFloat64 };

// YOUR OP: what a kernel has to know. Tensors are pointers to dense memory, sizes are 64-bit.
struct ForwardArgs {
  DType dtype;  // of every tensor
  std::int64_t count;
  double scale;
  const void* input;  // [count]
  void* output;       // [count]
};

struct BackwardArgs {
  DType dtype;
  std::int64_t count;
  double scale;
  const void* grad_output;  // [count]
  void* grad_input;         // [count]
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

// YOUR OP: the formula and its derivative, once for both backends. A is float or double.
template <typename A>
HOST_DEVICE A forward_formula(A x, A scale) {
  return x * scale;
}

template <typename A>
HOST_DEVICE A backward_formula(A dy, A scale) {
  return dy * scale;
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

// Each works on the elements first, ..., last - 1: the binding spreads ranges over threads.
namespace cpu {
void forward(const ForwardArgs& args, std::int64_t first, std::int64_t last);
void backward(const BackwardArgs& args, std::int64_t first, std::int64_t last);
}  // namespace cpu

}  // namespace template_op
