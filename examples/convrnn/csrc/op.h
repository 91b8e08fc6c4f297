// One call as plain values and pointers, and the CPU backend's functions. Both backends and the
// binding include it. Torch-free, so that plain nvcc compiles kernel.cu in seconds.
//
//   h_t[i] = tanh(x_t[i] + sum over k of kernel[k] · h_{t-1}[i + k - left(taps)])
//
// with zeros beyond both ends of h: PyTorch's conv1d with padding "same".
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__ __forceinline__
#else
#define HOST_DEVICE inline
#endif

namespace convrnn {

enum class DType { kFloat16, kBFloat16, kFloat32, kFloat64 };

struct Sizes {
  std::int64_t batch;
  std::int64_t steps;
  std::int64_t cols;
  std::int64_t taps;  // of the kernel
};

struct ForwardArgs {
  DType dtype;  // of every tensor
  Sizes sizes;
  const void* x;       // [batch, steps, cols]
  const void* kernel;  // [taps]
  const void* hidden;  // [batch, cols]: the state before the first step
  void* output;        // [batch, steps, cols]: all states
};

struct BackwardArgs {
  DType dtype;
  Sizes sizes;
  const void* grad_output;  // [batch, steps, cols]
  const void* output;       // as forward returned it
  const void* kernel;
  const void* hidden;
  void* grad_x;       // [batch, steps, cols]
  void* grad_kernel;  // [batch, taps] of Accumulator: the caller adds them up over the batch
  void* grad_hidden;  // [batch, cols]
};

// How many elements of h the kernel reaches to the left, and how many zeros make either end safe,
// for the kernel and for the kernel turned around, which backward applies.
template <typename Int>
HOST_DEVICE Int left(Int taps) {
  return (taps - 1) / 2;
}
template <typename Int>
HOST_DEVICE Int padding(Int taps) {
  return taps / 2;
}

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

// Rows first, ..., last - 1 of the batch: the binding spreads ranges over threads.
namespace cpu {
void forward(const ForwardArgs& args, std::int64_t first, std::int64_t last);
void backward(const BackwardArgs& args, std::int64_t first, std::int64_t last);
}  // namespace cpu

}  // namespace convrnn
