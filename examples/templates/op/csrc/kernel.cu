// The CUDA kernels and their launchers. No torch header, so that this file compiles alone in
// seconds:
//   nvcc -std=c++20 -O3 -arch=sm_90 -Xptxas -v -c csrc/kernel.cu -o /dev/null
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

#include "kernel.h"

namespace template_op::cuda {
namespace {

struct CudaTypes {
  using Float16 = __half;
  using BFloat16 = __nv_bfloat16;
};

constexpr int kThreads = 256;

// 16 bytes of neighbouring elements: what one instruction of a thread moves at most.
template <typename T>
constexpr int kWidth = 16 / static_cast<int>(sizeof(T));

template <typename T>
struct Pack {
  T values[kWidth<T>];
};

// The elements from..., of which there are `valid` up to the end of the tensor.
template <typename T>
__device__ __forceinline__ Pack<T> load(const T* from, std::int64_t valid) {
  Pack<T> pack{};
  if (valid >= kWidth<T>) {
    const uint4 word = *reinterpret_cast<const uint4*>(from);
    memcpy(&pack, &word, sizeof(pack));
  } else {
    for (int j = 0; j < kWidth<T>; ++j) {
      if (j < valid) {
        pack.values[j] = from[j];
      }
    }
  }
  return pack;
}

template <typename T>
__device__ __forceinline__ void store(T* to, const Pack<T>& pack, std::int64_t valid) {
  if (valid >= kWidth<T>) {
    uint4 word;
    memcpy(&word, &pack, sizeof(pack));
    // Not an assignment: the compiler takes that apart into stores of 2 and 4 bytes (nvcc -ptx).
    __stwb(reinterpret_cast<uint4*>(to), word);
  } else {
    for (int j = 0; j < kWidth<T>; ++j) {
      if (j < valid) {
        to[j] = pack.values[j];
      }
    }
  }
}

// The first element of this thread's pack. 64 bits: a tensor may have more than 2^31 elements.
template <typename T>
__device__ __forceinline__ std::int64_t first_element() {
  return (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kWidth<T>;
}

// YOUR OP: the kernels. An elementwise one is done with a change of the formulas in op.h.
template <typename T>
__global__ void __launch_bounds__(kThreads) forward_kernel(ForwardArgs args) {
  using A = Accumulator<T>;
  const std::int64_t first = first_element<T>();
  if (first >= args.count) {
    return;
  }
  Pack<T> pack = load(static_cast<const T*>(args.input) + first, args.count - first);
  for (int j = 0; j < kWidth<T>; ++j) {
    const A x = static_cast<A>(pack.values[j]);
    pack.values[j] = static_cast<T>(forward_formula(x, static_cast<A>(args.scale)));
  }
  store(static_cast<T*>(args.output) + first, pack, args.count - first);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) backward_kernel(BackwardArgs args) {
  using A = Accumulator<T>;
  const std::int64_t first = first_element<T>();
  if (first >= args.count) {
    return;
  }
  Pack<T> pack = load(static_cast<const T*>(args.grad_output) + first, args.count - first);
  for (int j = 0; j < kWidth<T>; ++j) {
    const A dy = static_cast<A>(pack.values[j]);
    pack.values[j] = static_cast<T>(backward_formula(dy, static_cast<A>(args.scale)));
  }
  store(static_cast<T*>(args.grad_input) + first, pack, args.count - first);
}

// How many CTAs give every pack a thread.
template <typename T>
unsigned ctas_for(std::int64_t count) {
  const std::int64_t per_cta = kThreads * kWidth<T>;
  return static_cast<unsigned>((count + per_cta - 1) / per_cta);
}

}  // namespace

cudaError_t forward(const ForwardArgs& args, cudaStream_t stream) {
  with_dtype<CudaTypes>(args.dtype, [&]<typename T>() {
    forward_kernel<T><<<ctas_for<T>(args.count), kThreads, 0, stream>>>(args);
  });
  return cudaGetLastError();
}

cudaError_t backward(const BackwardArgs& args, cudaStream_t stream) {
  with_dtype<CudaTypes>(args.dtype, [&]<typename T>() {
    backward_kernel<T><<<ctas_for<T>(args.count), kThreads, 0, stream>>>(args);
  });
  return cudaGetLastError();
}

}  // namespace template_op::cuda
