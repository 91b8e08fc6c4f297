// Rounds rows of an output in memory to 8 bits and stores their scales. This is the second half of
// what forward_quantized.cuh does at once, for the rows that it does not take: those too long for a
// CTA, those that are not whole vectors, and the few whose lanes are no power of two. Compiled by
// nvcc and by NVRTC; torch-free.
#pragma once

#include "cuda/dependent_launch.cuh"
#include "cuda/memory.cuh"
#include "cuda/quantize_pack.cuh"

namespace fused_op::cuda {

constexpr int kQuantizePack = 4;  // elements that a thread takes at a time

// A row in memory, which may begin anywhere.
template <typename Y>
struct OutputRow {
  static constexpr int N = kQuantizePack;

  const Y* from;
  std::uint8_t* to;
  std::int64_t cols;

  // Elements past the end are zero.
  __device__ __forceinline__ Pack<Y, N> load(std::int64_t col) const {
    Y elements[N] = {};
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (col + j < cols) {
        elements[j] = from[col + j];
      }
    }
    return as_pack(elements);
  }
  __device__ __forceinline__ void store(std::int64_t col, const Pack<Byte, N>& bytes) const {
    if (col + N <= cols && reinterpret_cast<std::uintptr_t>(to + col) % N == 0) {
      *reinterpret_cast<std::uint32_t*>(to + col) = bytes.words[0];
      return;
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (col + j < cols) {
        to[col + j] = static_cast<std::uint8_t>(bytes.words[0] >> (8 * j));
      }
    }
  }
};

// grid: one CTA a row. A block of 128 columns belongs to one warp.
template <typename Y, typename As>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_rows_kernel(const __grid_constant__ QuantizedForwardArgs args) {
  constexpr int N = kQuantizePack;
  static_assert(kWarpSize * N == kBlockCols);
  const std::int64_t number = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const OutputRow<Y> row{static_cast<const Y*>(args.output.data) + number * args.cols,
                         static_cast<std::uint8_t*>(args.to.quantized) + number * args.cols,
                         args.cols};
  await_kernels_before();
  Scale scale{};
  if constexpr (As::kScheme == Scheme::kTensor) {
    scale = given_scale(*args.to.given, As::rule());
  } else if constexpr (As::kScheme == Scheme::kToken) {
    std::uint32_t largest = 0;
    for (std::int64_t col = thread * N; col < args.cols; col += kQuantizeThreads * N) {
      largest = largest_of_pack(row.load(col), largest);
    }
    __shared__ std::uint32_t of_warps[kQuantizeThreads / kWarpSize];
    const float of_warp = largest_of_lanes<Y, kWarpSize>(largest);
    if (thread % kWarpSize == 0) {
      of_warps[thread / kWarpSize] = __float_as_uint(of_warp);
    }
    __syncthreads();
    const std::uint32_t mine = of_warps[thread % (kQuantizeThreads / kWarpSize)];
    const float amax = largest_of_lanes<float, kWarpSize>(mine);
    scale = scale_of(amax, As::rule(), DTypeOf<Y>::kValue);
    if (thread == 0) {
      store_scale(args.to, number, 0, scale);
    }
  }
  // In each step a warp has one block, so all of its lanes take part or none.
  const std::int64_t warp_first = thread / kWarpSize * kBlockCols;
  for (std::int64_t first = warp_first; first < args.cols; first += kQuantizeThreads * N) {
    const std::int64_t col = first + thread % kWarpSize * N;
    const Pack<Y, N> pack = row.load(col);
    if constexpr (As::kScheme == Scheme::kBlock128) {
      const float amax = largest_of_lanes<Y, kWarpSize>(largest_of_pack(pack, 0));
      scale = scale_of(amax, As::rule(), DTypeOf<Y>::kValue);
      if (thread % kWarpSize == 0) {
        store_scale(args.to, number, first / kBlockCols, scale);
      }
    }
    row.store(col, quantized_pack<As>(pack, scaler_of(scale)));
  }
}

}  // namespace fused_op::cuda
