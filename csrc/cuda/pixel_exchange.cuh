// What backward of norms over channels is compiled for, and how the threads of a CTA share what
// they know of its pixels. Device code; torch-free.
#pragma once

#include <type_traits>

#include "core/pack.h"
#include "cuda/channels_first.h"
#include "cuda/row_sum.cuh"

namespace fused_op::cuda {

// Which channels of a tile are in shared memory at once.
struct AllChannels {};
struct SomeChannels {};

// What a kernel is compiled for. E: the elements that it reads and writes; W: those of the
// parameters; Staged: AllChannels or SomeChannels.
template <typename Norm_, typename E_, typename W_, int kPack_, int kLanes_, int kSlices_,
          typename Staged, bool kSilu_>
struct ChannelsFirstBackwardOp {
  using Norm = Norm_;
  using E = E_;
  using W = W_;
  using A = Accumulator<E>;
  static constexpr int N = kVector<E>;  // pixels of a thread
  static constexpr int kPack = kPack_;
  static constexpr int kLanes = kLanes_;
  static constexpr int kSlices = kSlices_;
  static constexpr bool kWhole = std::is_same_v<Staged, AllChannels>;
  static constexpr bool kSilu = kSilu_;
  static constexpr int kTile = kLanes * N;  // pixels
  static constexpr int kRowBytes = kLanes * kVectorBytes;
  static constexpr int kThreads = kLanes * kSlices;
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr int kSlicesOfWarp = kWarpSize / kLanes;
  static constexpr int kMostCtas = 16;  // what every GPU has room for
  static constexpr int kSmThreads = backward_threads(sizeof(E), kPack, kSilu);
  static constexpr int kCtasPerSm =
      kSmThreads < kMostCtas * kThreads ? kSmThreads / kThreads : kMostCtas;
};

// Where a thread stands in its CTA.
template <typename Op>
struct PixelThread {
  int in_warp = static_cast<int>(threadIdx.x) % kWarpSize;
  int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  int lane = static_cast<int>(threadIdx.x) % Op::kLanes;  // its pixels begin at lane · N
  // Slices that differ in the lowest bit only have their lanes at distance 16, those that differ in
  // the next one at distance 8, and so on. Whatever kLanes is, sums of slices are added in the same
  // order: see PixelExchange.
  int slice =
      warp * Op::kSlicesOfWarp + static_cast<int>(__brev(threadIdx.x) >> 27) % Op::kSlicesOfWarp;
};

// Sums each of kCount values, a power of two, over those lanes of a warp that differ in the bits
// kFrom, kFrom / 2, .. kTo. Each step halves the values that a lane holds, so there is about one
// shuffle per value. The last sums are at the front: of the lanes, ordered by these bits, the first
// ones have the first values.
template <int kCount, int kFrom, int kTo, typename A, int kSize>
__device__ __forceinline__ void sum_over_lanes(A (&values)[kSize], int lane) {
  if constexpr (kFrom < kTo) {
    return;
  } else if constexpr (kCount == 1) {
    values[0] += __shfl_xor_sync(kAllLanes, values[0], kFrom);
    sum_over_lanes<1, kFrom / 2, kTo>(values, lane);
  } else {
    constexpr int kHalf = kCount / 2;
    const bool upper = (lane & kFrom) != 0;
#pragma unroll
    for (int k = 0; k < kHalf; ++k) {
      const A mine = upper ? values[k + kHalf] : values[k];
      const A theirs = upper ? values[k] : values[k + kHalf];
      values[k] = mine + __shfl_xor_sync(kAllLanes, theirs, kFrom);
    }
    sum_over_lanes<kHalf, kFrom / 2, kTo>(values, lane);
  }
}

// values[0] + values[stride] + .., added in pairs, and the pairs in pairs.
template <int kCount, typename A>
__device__ __forceinline__ A sum_in_pairs(const A* values, int stride) {
  if constexpr (kCount == 1) {
    return values[0];
  } else {
    return sum_in_pairs<kCount / 2>(values, stride) +
           sum_in_pairs<kCount / 2>(values + kCount / 2 * stride, stride);
  }
}

// What the threads of a CTA tell each other about its pixels, in shared memory: sums over the
// slices, and a few values that every thread needs. Thread p is the owner of pixel p: it adds
// up the sums and computes those values, once.
template <typename Op>
class PixelExchange {
  using A = typename Op::A;
  static constexpr int N = Op::N;
  static_assert(Op::kTile <= Op::kThreads);

 public:
  // `shared`: exchanged_values().
  __device__ __forceinline__ PixelExchange(A* shared, const PixelThread<Op>& thread)
      : values_(shared), parts_(shared + kPixelValues * Op::kTile), thread_(thread) {}

  // Value k of a pixel, to be set by its owner, or of this thread's pixels. There must be a barrier
  // between the two.
  __device__ __forceinline__ void set(int k, A value) const {
    values_[k * Op::kTile + static_cast<int>(threadIdx.x)] = value;
  }
  __device__ __forceinline__ void get(int k, A (&values)[N]) const {
    struct alignas(kVectorBytes) OfThread {
      A values[N];
    };
    const auto mine = reinterpret_cast<const OfThread*>(values_ + k * Op::kTile)[thread_.lane];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      values[j] = mine.values[j];
    }
  }
  __device__ __forceinline__ bool owns() const { return static_cast<int>(threadIdx.x) < Op::kTile; }

  // Makes the first values of each pixel the sums of `parts` over the slices. All threads call
  // this, and can get() the sums afterwards.
  __device__ __forceinline__ void add(const A (&parts)[kPixelSums][N]) const {
    constexpr int kCount = kPixelSums * N;
    constexpr int kSlots = Op::kLanes * kCount;
    A held[kCount];
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      held[v] = parts[v / N][v % N];
    }
    sum_over_lanes<kCount, kWarpSize / 2, Op::kLanes>(held, thread_.in_warp);
    constexpr int kHeld = kCount > Op::kSlicesOfWarp ? kCount / Op::kSlicesOfWarp : 1;
    constexpr int kSharers = Op::kSlicesOfWarp > kCount ? Op::kSlicesOfWarp / kCount : 1;
    const int place = thread_.in_warp / Op::kLanes;
    if (place % kSharers == 0) {
#pragma unroll
      for (int v = 0; v < kHeld; ++v) {
        parts_[thread_.warp * kSlots + thread_.lane * kCount + place / kSharers * kHeld + v] =
            held[v];
      }
    }
    __syncthreads();
    if (owns()) {
      const int pixel = static_cast<int>(threadIdx.x);
#pragma unroll
      for (int k = 0; k < kPixelSums; ++k) {
        const int slot = pixel / N * kCount + k * N + pixel % N;
        set(k, sum_in_pairs<Op::kWarps>(parts_ + slot, kSlots));
      }
    }
    __syncthreads();
  }

 private:
  A* values_;
  A* parts_;
  PixelThread<Op> thread_;
};

}  // namespace fused_op::cuda
