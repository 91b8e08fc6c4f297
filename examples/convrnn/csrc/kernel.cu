// The CUDA kernels: a CTA takes one row of the batch through all steps, and keeps its state in
// shared memory. No torch header, so that this file compiles alone:
//   nvcc -std=c++20 -O3 -arch=sm_90 -Xptxas -v -c csrc/kernel.cu -o /dev/null
//
// A step is short, and the next one waits for it: what counts is how long one step takes, not how
// many bytes move. So there is one barrier a step, since each step reads one buffer and writes
// another; and what a step needs from global memory is requested a step earlier.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "kernel.h"

namespace convrnn::cuda {
namespace {

struct CudaTypes {
  using Float16 = __half;
  using BFloat16 = __nv_bfloat16;
};

constexpr int kWarpSize = 32;
constexpr int kMaxThreads = 1024;

// Elements i = threadIdx.x, threadIdx.x + blockDim.x, ... of a state are this thread's own: at most
// kOwn of them. Calls function(e, i) for the e-th, i.
template <int kOwn, typename Function>
__device__ __forceinline__ void for_own(int cols, Function&& function) {
#pragma unroll
  for (int e = 0; e < kOwn; ++e) {
    const int i = static_cast<int>(threadIdx.x + e * blockDim.x);
    if (i < cols) {
      function(e, i);
    }
  }
}

// Shared memory, as accumulators; every state has zeros at both ends.
template <typename A>
__device__ __forceinline__ A* shared_memory() {
  extern __shared__ double smem[];  // as aligned as any accumulator
  return reinterpret_cast<A*>(smem);
}

template <typename T, int kOwn>
__global__ void __launch_bounds__(kMaxThreads) forward_kernel(ForwardArgs args) {
  using A = Accumulator<T>;
  const int cols = static_cast<int>(args.sizes.cols);
  const int taps = static_cast<int>(args.sizes.taps);
  const int pad = padding(taps);
  const int width = cols + 2 * pad;
  A* now = shared_memory<A>() + pad;  // h_{t-1}, which step t reads
  A* next = now + width;              // h_t, which it writes
  A* const kernel = shared_memory<A>() + 2 * width;

  const std::int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(args.x) + row * args.sizes.steps * cols;
  const T* const hidden = static_cast<const T*>(args.hidden) + row * cols;
  T* output = static_cast<T*>(args.output) + row * args.sizes.steps * cols;
  T ahead[kOwn];  // x of the step to come
  for_own<kOwn>(cols, [&](int e, int i) { ahead[e] = x[i]; });
  for (int i = threadIdx.x; i < 2 * width; i += blockDim.x) {
    shared_memory<A>()[i] = A(0);
  }
  for (int k = threadIdx.x; k < taps; k += blockDim.x) {
    kernel[k] = static_cast<A>(static_cast<const T*>(args.kernel)[k]);
  }
  __syncthreads();  // the zeros are there, before values take the places of some
  for_own<kOwn>(cols, [&](int, int i) { now[i] = static_cast<A>(hidden[i]); });

  for (std::int64_t t = 0; t < args.sizes.steps; ++t) {
    A sums[kOwn];
    for_own<kOwn>(cols, [&](int e, int) { sums[e] = static_cast<A>(ahead[e]); });
    x += cols;
    if (t + 1 < args.sizes.steps) {
      for_own<kOwn>(cols, [&](int e, int i) { ahead[e] = x[i]; });
    }
    __syncthreads();  // `now` is complete, and nobody reads `next`, the `now` of the step before
    for_own<kOwn>(cols, [&](int e, int i) {
      for (int k = 0; k < taps; ++k) {
        sums[e] += kernel[k] * now[i + k - left(taps)];
      }
      const T h = static_cast<T>(tanh(sums[e]));
      output[i] = h;
      next[i] = static_cast<A>(h);  // rounded: the state is what backward will read
    });
    output += cols;
    A* const swapped = now;
    now = next;
    next = swapped;
  }
}

// How the gradient of the kernel is shared out: it has `taps` elements, each a sum over all columns
// and steps. A tap's columns are cut into segments, so that every warp has something to do.
HOST_DEVICE int segments(int taps, int warps) { return warps > taps ? warps / taps : 1; }

// A step's part of the gradient of the kernel: each warp takes segments, each lane sums its own.
template <typename A>
__device__ void add_to_sums(A* sums, const A* dz, const A* before, int cols, int taps, int units) {
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  for (int unit = static_cast<int>(threadIdx.x) / kWarpSize; unit < units; unit += warps) {
    const int parts = units / taps;
    const int k = unit / parts;
    const int end = cols * (unit % parts + 1) / parts;
    A sum = 0;
    for (int i = cols * (unit % parts) / parts + lane; i < end; i += kWarpSize) {
      sum += dz[i] * before[i + k - left(taps)];
    }
    sums[unit * kWarpSize + lane] += sum;
  }
}

// The lanes' sums of each tap, added up in one order.
template <typename A>
__device__ void store_kernel_gradient(A* grad_kernel, const A* sums, int taps, int units) {
  const int count = units / taps * kWarpSize;
  for (int k = threadIdx.x; k < taps; k += blockDim.x) {
    A sum = 0;
    for (int j = 0; j < count; ++j) {
      sum += sums[k * count + j];
    }
    grad_kernel[k] = sum;
  }
}

// From the last step to the first. dz is the gradient before the tanh; what it passes on to the
// step before is dz convolved with the kernel turned around.
template <typename T, int kOwn>
__global__ void __launch_bounds__(kMaxThreads) backward_kernel(BackwardArgs args) {
  using A = Accumulator<T>;
  const int cols = static_cast<int>(args.sizes.cols);
  const int taps = static_cast<int>(args.sizes.taps);
  const int pad = padding(taps);
  const int width = cols + 2 * pad;
  const int units = taps * segments(taps, static_cast<int>(blockDim.x) / kWarpSize);
  A* dz = shared_memory<A>() + pad;  // of this step
  A* dz_after = dz + width;          // of the step after
  A* before = dz_after + width;      // h_{t-1}
  A* h = before + width;             // h_t
  A* const sums = h - pad + width;   // [units, 32]: each lane's part of the kernel's gradient
  A* const kernel = sums + units * kWarpSize;

  const std::int64_t row = blockIdx.x;
  const std::int64_t last = (row * args.sizes.steps + args.sizes.steps - 1) * cols;
  const T* grad_output = static_cast<const T*>(args.grad_output) + last;
  const T* output = static_cast<const T*>(args.output) + last;
  const T* const hidden = static_cast<const T*>(args.hidden) + row * cols;
  T* grad_x = static_cast<T*>(args.grad_x) + last;
  T dy_ahead[kOwn], before_ahead[kOwn];  // of the step to come
  const T* source = args.sizes.steps > 1 ? output - cols : hidden;
  for_own<kOwn>(cols, [&](int e, int i) {
    dy_ahead[e] = grad_output[i];
    before_ahead[e] = source[i];
  });
  for (int i = threadIdx.x; i < 4 * width + units * kWarpSize; i += blockDim.x) {
    shared_memory<A>()[i] = A(0);
  }
  for (int k = threadIdx.x; k < taps; k += blockDim.x) {
    kernel[k] = static_cast<A>(static_cast<const T*>(args.kernel)[k]);
  }
  __syncthreads();
  for_own<kOwn>(cols, [&](int, int i) { h[i] = static_cast<A>(output[i]); });  // its own alone

  // What step t gets from the step after it, or the hidden state from step 0.
  const auto passed_on = [&](const A* from, int i) {
    A sum = 0;
    for (int k = 0; k < taps; ++k) {
      sum += kernel[k] * from[i - k + left(taps)];
    }
    return sum;
  };
  for (std::int64_t t = args.sizes.steps - 1; t >= 0; --t) {
    for_own<kOwn>(cols, [&](int e, int i) {
      const A dh = static_cast<A>(dy_ahead[e]) + passed_on(dz_after, i);
      dz[i] = dh * (A(1) - h[i] * h[i]);
      before[i] = static_cast<A>(before_ahead[e]);
      grad_x[i] = static_cast<T>(dz[i]);
    });
    if (t > 0) {
      grad_x -= cols;
      grad_output -= cols;
      output -= cols;
      source = t > 1 ? output - cols : hidden;
      for_own<kOwn>(cols, [&](int e, int i) {
        dy_ahead[e] = grad_output[i];
        before_ahead[e] = source[i];
      });
    }
    // `dz` and `before` are complete. The next step writes `dz_after` and `h`, which nobody reads
    // from here on.
    __syncthreads();
    add_to_sums(sums, dz, before, cols, taps, units);
    A* const swapped_dz = dz;
    dz = dz_after;
    dz_after = swapped_dz;
    A* const swapped_h = before;
    before = h;
    h = swapped_h;
  }

  T* const grad_hidden = static_cast<T*>(args.grad_hidden) + row * cols;
  for_own<kOwn>(cols, [&](int, int i) { grad_hidden[i] = static_cast<T>(passed_on(dz_after, i)); });
  __syncthreads();  // `sums` is complete
  store_kernel_gradient(static_cast<A*>(args.grad_kernel) + row * taps, sums, taps, units);
}

int threads_for(std::int64_t cols) {
  const std::int64_t warps = (cols + kWarpSize - 1) / kWarpSize;
  return static_cast<int>(std::min<std::int64_t>(warps * kWarpSize, kMaxThreads));
}

// More than 48 KiB have to be asked for.
template <typename Args>
cudaError_t launch(void (*kernel)(Args), const Args& args, cudaStream_t stream) {
  const std::int64_t bytes = smem_bytes(args.dtype, args.sizes);
  const cudaError_t status = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (status != cudaSuccess) {
    return status;
  }
  kernel<<<static_cast<unsigned>(args.sizes.batch), threads_for(args.sizes.cols),
           static_cast<std::size_t>(bytes), stream>>>(args);
  return cudaGetLastError();
}

// kOwn for a state of so many columns. 16 · 1024 is more than shared memory holds; with 16, some
// registers of the backward kernel spill, which a step of 16 elements a thread can bear.
template <typename Function>
cudaError_t with_own(std::int64_t cols, Function&& function) {
  if (cols <= kMaxThreads) {
    return function.template operator()<1>();
  }
  if (cols <= 4 * kMaxThreads) {
    return function.template operator()<4>();
  }
  return function.template operator()<16>();
}

}  // namespace

std::int64_t smem_bytes(DType dtype, const Sizes& sizes) {
  const std::int64_t width = sizes.cols + 2 * padding(sizes.taps);
  const std::int64_t warps = threads_for(sizes.cols) / kWarpSize;
  const std::int64_t units = sizes.taps * std::max<std::int64_t>(1, warps / sizes.taps);
  const std::int64_t accumulator = dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
  return (4 * width + units * kWarpSize + sizes.taps) * accumulator;
}

std::int64_t smem_limit() {
  int device = 0, bytes = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return bytes;
}

cudaError_t forward(const ForwardArgs& args, cudaStream_t stream) {
  return with_dtype<CudaTypes>(args.dtype, [&]<typename T>() {
    return with_own(args.sizes.cols,
                    [&]<int kOwn>() { return launch(forward_kernel<T, kOwn>, args, stream); });
  });
}

cudaError_t backward(const BackwardArgs& args, cudaStream_t stream) {
  return with_dtype<CudaTypes>(args.dtype, [&]<typename T>() {
    return with_own(args.sizes.cols,
                    [&]<int kOwn>() { return launch(backward_kernel<T, kOwn>, args, stream); });
  });
}

}  // namespace convrnn::cuda
