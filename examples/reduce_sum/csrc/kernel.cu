// The CUDA kernel: a sum in four stages, each of a fixed order. Elements -> a thread's registers ->
// a warp, by shuffles -> a CTA, through shared memory. No torch header, so that this compiles
// alone:
//   nvcc -std=c++20 -O3 -arch=sm_90 -Xptxas -v -c csrc/kernel.cu -o /dev/null
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernel.h"

namespace reduce_sum::cuda {
namespace {

struct CudaTypes {
  using Float16 = __half;
  using BFloat16 = __nv_bfloat16;
};

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kCtaThreads = 256;
constexpr std::int64_t kWarpCols = 1024;  // rows up to this length get a warp, longer ones a CTA
constexpr int kInFlight = 4;  // loads that a thread has under way: one would not keep memory busy

// Adds up over the lanes of a warp; valid in every lane. All 32 lanes must call. In each round a
// lane adds what its partner holds, 16, 8, 4, 2 and 1 lanes away. x + y and y + x are the same
// bits, so that all lanes agree.
template <typename A>
__device__ __forceinline__ A warp_sum(A value) {
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, offset);
  }
  return value;
}

// Adds up over the threads of a CTA; valid in warp 0. All threads must call.
template <typename A>
__device__ __forceinline__ A cta_sum(A value) {
  constexpr int kWarps = kCtaThreads / kWarpSize;
  __shared__ A warp_sums[kWarps];
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  value = warp_sum(value);
  if (lane == 0) {
    warp_sums[warp] = value;
  }
  __syncthreads();
  return warp_sum(lane < kWarps ? warp_sums[lane] : A(0));
}

// What this thread, of `threads` of the part, adds up: N elements per load, that is 16 bytes or
// one.
template <int N, typename In>
__device__ __forceinline__ Accumulator<In> thread_sum(const In* part, std::int64_t count,
                                                      int thread, int threads) {
  using A = Accumulator<In>;
  using Word = std::conditional_t<N == 1, In, uint4>;
  A sums[N] = {};
  const std::int64_t step = static_cast<std::int64_t>(threads) * N;
  for (std::int64_t i = static_cast<std::int64_t>(thread) * N; i < count; i += kInFlight * step) {
    Word words[kInFlight] = {};  // zeros past the end
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (i + k * step < count) {
        words[k] = *reinterpret_cast<const Word*>(part + i + k * step);
      }
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      In values[N];
      memcpy(values, &words[k], sizeof(values));
      for (int j = 0; j < N; ++j) {
        sums[j] += static_cast<A>(values[j]);
      }
    }
  }
  A sum = 0;
  for (int j = 0; j < N; ++j) {
    sum += sums[j];
  }
  return sum;
}

// A warp for each part (kThreads = 32, several of them in a CTA), or a CTA.
template <typename In, typename Out, int kThreads, int N>
__global__ void __launch_bounds__(kCtaThreads) sum_parts_kernel(SumArgs args) {
  const std::int64_t index =
      static_cast<std::int64_t>(blockIdx.x) * (kCtaThreads / kThreads) + threadIdx.x / kThreads;
  if (index >= args.rows * args.parts) {
    return;  // whole warps, and never where a CTA has one part: nobody waits for them
  }
  const std::int64_t begin = index % args.parts * args.part;
  const In* part = static_cast<const In*>(args.input) + index / args.parts * args.cols + begin;
  const std::int64_t left = args.cols - begin;
  const std::int64_t count = left < args.part ? left : args.part;
  const int thread = static_cast<int>(threadIdx.x) % kThreads;

  Accumulator<In> sum = thread_sum<N>(part, count, thread, kThreads);
  if constexpr (kThreads == kWarpSize) {
    sum = warp_sum(sum);
  } else {
    sum = cta_sum(sum);
  }
  if (thread == 0) {
    static_cast<Out*>(args.output)[index] = static_cast<Out>(sum);
  }
}

template <typename In, typename Out, int kThreads, int N>
void launch(const SumArgs& args, cudaStream_t stream) {
  constexpr std::int64_t kPerCta = kCtaThreads / kThreads;
  const std::int64_t ctas = (args.rows * args.parts + kPerCta - 1) / kPerCta;
  sum_parts_kernel<In, Out, kThreads, N>
      <<<static_cast<unsigned>(ctas), kCtaThreads, 0, stream>>>(args);
}

}  // namespace

cudaError_t sum_parts(const SumArgs& args, cudaStream_t stream) {
  with_dtypes<CudaTypes>(args, [&]<typename In, typename Out>() {
    constexpr int kWidth = 16 / static_cast<int>(sizeof(In));
    const bool whole = args.cols % kWidth == 0;  // then every row begins at a multiple of 16 bytes
    if (args.cols <= kWarpCols) {
      whole ? launch<In, Out, kWarpSize, kWidth>(args, stream)
            : launch<In, Out, kWarpSize, 1>(args, stream);
    } else {
      whole ? launch<In, Out, kCtaThreads, kWidth>(args, stream)
            : launch<In, Out, kCtaThreads, 1>(args, stream);
    }
  });
  return cudaGetLastError();
}

}  // namespace reduce_sum::cuda
