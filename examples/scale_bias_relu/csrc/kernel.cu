// The CUDA kernels and their launchers. No torch header, so that this file compiles alone in
// seconds:
//   nvcc -std=c++20 -O3 -arch=sm_90 -Xptxas -v -c csrc/kernel.cu -o /dev/null
//
// Every thread owns a few neighbouring columns and walks down the rows: a bias that was read once
// stays in registers, no index needs a division, and in backward a thread sums its own columns.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernel.h"

namespace scale_bias_relu::cuda {
namespace {

struct CudaTypes {
  using Float16 = __half;
  using BFloat16 = __nv_bfloat16;
};

constexpr int kLanes = 32;  // threads of a CTA along the columns: a warp reads 512 bytes of a row
constexpr int kWarps = 8;   // threads of a CTA along the rows
// CTAs that a launch aims at: two per place on a GPU of 130 multiprocessors. A constant, not asked
// of the device, so that the order of the sums is the same on every GPU.
constexpr std::int64_t kCtas = 2048;
// Loads that a thread has under way before it computes with the first: one at a time would not keep
// the memory busy.
constexpr int kInFlight = 4;

// N neighbouring elements: one, or 16 bytes of them.
template <typename T, int N>
struct Pack {
  T values[N];
};

template <typename T, int N>
__device__ __forceinline__ Pack<T, N> load(const T* from) {
  using Word = std::conditional_t<N == 1, T, uint4>;
  const Word word = *reinterpret_cast<const Word*>(from);
  Pack<T, N> pack;
  memcpy(&pack, &word, sizeof(pack));
  return pack;
}
template <typename T, int N>
__device__ __forceinline__ void store(T* to, const Pack<T, N>& pack) {
  if constexpr (N == 1) {
    *to = pack.values[0];
  } else {
    uint4 word;
    memcpy(&word, &pack, sizeof(pack));
    // Not an assignment: the compiler takes that apart into stores of 2 and 4 bytes (nvcc -ptx).
    __stwb(reinterpret_cast<uint4*>(to), word);
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kLanes* kWarps) forward_kernel(ForwardArgs args) {
  using A = Accumulator<T>;
  const std::int64_t col = (static_cast<std::int64_t>(blockIdx.x) * kLanes + threadIdx.x) * N;
  if (col >= args.cols) {
    return;
  }
  const T* __restrict__ input = static_cast<const T*>(args.input) + col;
  T* __restrict__ output = static_cast<T*>(args.output) + col;
  const A scale = static_cast<A>(args.scale);
  A bias[N] = {};
  if (args.bias != nullptr) {
    const Pack<T, N> pack = load<T, N>(static_cast<const T*>(args.bias) + col);
    for (int j = 0; j < N; ++j) {
      bias[j] = static_cast<A>(pack.values[j]);
    }
  }
  const std::int64_t step = static_cast<std::int64_t>(gridDim.y) * kWarps;
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.y) * kWarps + threadIdx.y;
  for (std::int64_t row = first_row; row < args.rows; row += kInFlight * step) {
    Pack<T, N> packs[kInFlight] = {};
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (row + k * step < args.rows) {
        packs[k] = load<T, N>(input + (row + k * step) * args.cols);
      }
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (row + k * step < args.rows) {
        for (int j = 0; j < N; ++j) {
          const A x = static_cast<A>(packs[k].values[j]);
          packs[k].values[j] = static_cast<T>(scale_bias_relu(x, scale, bias[j]));
        }
        store(output + (row + k * step) * args.cols, packs[k]);
      }
    }
  }
}

// Step one of the column sum: the CTAs of grid row y leave row y of `partials`.
template <typename T, int N>
__global__ void __launch_bounds__(kLanes* kWarps) backward_kernel(BackwardArgs args) {
  using A = Accumulator<T>;
  const std::int64_t first_col = static_cast<std::int64_t>(blockIdx.x) * kLanes * N;
  const std::int64_t col = first_col + threadIdx.x * N;
  const T* __restrict__ grad_output = static_cast<const T*>(args.grad_output) + col;
  const T* __restrict__ output = static_cast<const T*>(args.output) + col;
  T* __restrict__ grad_input = static_cast<T*>(args.grad_input);
  const A scale = static_cast<A>(args.scale);
  const std::int64_t step = static_cast<std::int64_t>(gridDim.y) * kWarps;
  // The threads of no column have no row either, but do not return: __syncthreads waits for all.
  const std::int64_t rows = col < args.cols ? args.rows : 0;
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.y) * kWarps + threadIdx.y;
  constexpr int kRows = kInFlight / 2;  // two tensors are read
  A sum[N] = {};
  for (std::int64_t row = first_row; row < rows; row += kRows * step) {
    Pack<T, N> dy[kRows] = {};
    Pack<T, N> y[kRows] = {};
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      if (row + k * step < rows) {
        dy[k] = load<T, N>(grad_output + (row + k * step) * args.cols);
        y[k] = load<T, N>(output + (row + k * step) * args.cols);
      }
    }
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      if (row + k * step < rows) {
        Pack<T, N> dx;
        for (int j = 0; j < N; ++j) {
          const A dz =
              through_relu(static_cast<A>(dy[k].values[j]), static_cast<A>(y[k].values[j]));
          dx.values[j] = static_cast<T>(dz * scale);
          sum[j] += dz;
        }
        if (grad_input != nullptr) {
          store(grad_input + (row + k * step) * args.cols + col, dx);
        }
      }
    }
  }
  if (args.grad_bias == nullptr) {  // the same for all threads, so that all return
    return;
  }

  __shared__ A sums[kWarps][kLanes * N];
  for (int j = 0; j < N; ++j) {
    sums[threadIdx.y][threadIdx.x * N + j] = sum[j];
  }
  __syncthreads();
  A* partial = static_cast<A*>(args.partials) + blockIdx.y * args.cols;
  for (int i = threadIdx.y * kLanes + threadIdx.x; i < kLanes * N; i += kLanes * kWarps) {
    if (first_col + i < args.cols) {
      A total = 0;
      for (int warp = 0; warp < kWarps; ++warp) {
        total += sums[warp][i];
      }
      partial[first_col + i] = total;
    }
  }
}

// Step two: one column per lane, every kSumWarps-th partial sum per warp. The order is fixed, so
// that two runs agree in every bit; atomicAdd would take the values as they happen to come.
constexpr int kSumWarps = 32;
template <typename T>
__global__ void __launch_bounds__(kLanes* kSumWarps) grad_bias_kernel(BackwardArgs args) {
  using A = Accumulator<T>;
  const std::int64_t col = static_cast<std::int64_t>(blockIdx.x) * kLanes + threadIdx.x;
  const A* __restrict__ partials = static_cast<const A*>(args.partials);
  A sum = 0;
  if (col < args.cols) {
#pragma unroll 8
    for (std::int64_t part = threadIdx.y; part < args.parts; part += kSumWarps) {
      sum += partials[part * args.cols + col];
    }
  }
  __shared__ A sums[kSumWarps][kLanes];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && col < args.cols) {
    A total = 0;
    for (int warp = 0; warp < kSumWarps; ++warp) {
      total += sums[warp][threadIdx.x];
    }
    static_cast<T*>(args.grad_bias)[col] = static_cast<T>(total);
  }
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Elements per thread and load: 16 bytes, where every row begins at a multiple of that.
template <typename T, typename Function>
auto with_width(std::int64_t cols, Function&& function) {
  constexpr int kWidth = 16 / sizeof(T);
  return cols % kWidth == 0 ? function.template operator()<kWidth>()
                            : function.template operator()<1>();
}

dim3 grid_for(std::int64_t rows, std::int64_t cols, int width) {
  const std::int64_t x = ceil_div(cols, kLanes * width);
  const std::int64_t y = std::clamp<std::int64_t>(kCtas / x, 1, ceil_div(rows, kWarps));
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

}  // namespace

cudaError_t forward(const ForwardArgs& args, cudaStream_t stream) {
  with_dtype<CudaTypes>(args.dtype, [&]<typename T>() {
    with_width<T>(args.cols, [&]<int N>() {
      forward_kernel<T, N>
          <<<grid_for(args.rows, args.cols, N), dim3(kLanes, kWarps), 0, stream>>>(args);
    });
  });
  return cudaGetLastError();
}

std::int64_t backward_parts(DType dtype, std::int64_t rows, std::int64_t cols) {
  return with_dtype<CudaTypes>(dtype, [&]<typename T>() {
    return with_width<T>(cols, [&]<int N>() -> std::int64_t { return grid_for(rows, cols, N).y; });
  });
}

cudaError_t backward(const BackwardArgs& args, cudaStream_t stream) {
  with_dtype<CudaTypes>(args.dtype, [&]<typename T>() {
    with_width<T>(args.cols, [&]<int N>() {
      backward_kernel<T, N>
          <<<grid_for(args.rows, args.cols, N), dim3(kLanes, kWarps), 0, stream>>>(args);
    });
    if (args.grad_bias != nullptr) {
      const auto ctas = static_cast<unsigned>(ceil_div(args.cols, kLanes));
      grad_bias_kernel<T><<<ctas, dim3(kLanes, kSumWarps), 0, stream>>>(args);
    }
  });
  return cudaGetLastError();
}

}  // namespace scale_bias_relu::cuda
