// How backward reads and writes rows that are no whole number of vectors, and so begin anywhere: a
// lane's pack is of 4-byte words a warp apart, not of neighbouring elements. Whatever the address
// of a row, its words are then read from shared memory without a conflict or a shift, but for rows
// that begin in the middle of a word: those halves are put together. The element -> lane map is
// that of the row, never of its address. H200, bf16, share of the limit with ShiftedAccess and so:
// LayerNorm 0.56 0.73 at 263172x255, 0.74 0.79 at 131200x1023, 0.60 0.75 at 65472x2050, 0.51 0.65
// at 10922x12287; RMSNorm 0.76 0.78, 0.61 0.87 at the second and third; LayerNorm with the gradient
// of a sum 0.70 0.85 at 263172x255, 0.58 0.78 at 131200x1023, 0.52 0.87 at 65472x2050. (Forward has
// a kernel for them: forward_words.cuh.) Device code only; torch-free.
#pragma once

#include <type_traits>

#include "core/pack.h"
#include "cuda/flexible.cuh"
#include "cuda/row_access.cuh"
#include "cuda/row_sum.cuh"

namespace fused_op::cuda {

// Neighbouring elements in a lane's pack of N, in an access policy; the next ones are kWarpSize
// times as many elements away.
template <typename Access, typename T, int N>
constexpr int kRun = N;

// For all lanes of a warp. A word is one element of four bytes or two of two. Rows begin at
// multiples of kStartBytes: 4, or 2 where one may begin in the middle of a word.
template <int kStartBytes>
struct WordAccess {
  static constexpr bool kWholePacks = false;
  static constexpr bool kSharesBlocks = true;
  static constexpr bool kShifts = false;

  // `blocks` is the lane's block of a row in shared memory, whose words begin `shift` bytes behind
  // the first lane's. Without a branch, which would keep the loads of a row apart.
  template <int N, typename T>
  __device__ __forceinline__ static Pack<T, N> load_staged(std::uint32_t blocks, int shift) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const std::uint32_t words = blocks - lane * (kVectorBytes - kWordBytes) + (shift & ~3);
    [[maybe_unused]] const std::uint32_t bytes = shift % kWordBytes != 0 ? 0x5432 : 0x3210;
    Pack<T, N> pack;
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      pack.words[k] = load_shared_word(words + k * kWordStride);
      if constexpr (kHalves) {
        const std::uint32_t next = load_shared_word(words + k * kWordStride + kWordBytes);
        pack.words[k] = __byte_perm(pack.words[k], next, bytes);
      }
    }
    return pack;
  }

  // From global memory; zero past the row's end.
  template <int N, typename T, typename Col>
  __device__ __forceinline__ static Pack<T, N> load(const T* row, Col col, Col width) {
    Pack<T, N> pack{};
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      const Col at = col + k * kWarpSize * kElements<T>;
      if constexpr (kHalves) {
        pack.words[k] = load_halves(row + at, at < width, at + 1 < width);
      } else {
        load_if<1>(at < width, row + at, pack.words + k);
      }
    }
    return pack;
  }

  // As in ShiftedAccess, with elements counted from the lane's first one along the row.
  template <typename Col, typename A, typename T, int N, typename... Packs>
  __device__ __forceinline__ static void clip_to(A past, Col valid, Pack<T, N>& pack,
                                                 Packs&... packs) {
    if (valid < ((kWords - 1) * kWarpSize + 1) * kElements<T>) {
      const Pack<T, N> filler = filled<T, N>(past);
#pragma unroll
      for (int k = 0; k < kWords; ++k) {
        const Col left = valid - k * kWarpSize * kElements<T>;
        const std::uint32_t mask = left >= kElements<T> ? ~0u : left > 0 ? 0xffffu : 0u;
        pack.words[k] = (pack.words[k] & mask) | (filler.words[k] & ~mask);
        ((packs.words[k] &= mask), ...);
      }
    }
  }
  template <typename Col, typename T, int N>
  __device__ __forceinline__ static void clip(Col valid, Pack<T, N>& pack) {
    clip_to(Accumulator<T>(0), valid, pack);
  }

  // Of rows that begin in the middle of a word, a lane writes the word in which its own begins,
  // whose first half is the last one of the lane before it. The first and the last half of all
  // these are written by themselves.
  template <int kLanes, typename T, int N, int kVectors, typename Col>
  __device__ __forceinline__ static void store_row(T* row, Col col, Col width,
                                                   const Pack<T, N> (&packs)[kVectors]) {
    static_assert(kLanes == kWarpSize);
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const Col left = width - col;
    const Col left_of_warp = left + lane * kElements<T>;
    if (left_of_warp >= kVectors * kWords * kWarpSize * kElements<T>) {
      store_words<Inside>(row + col, left, lane, packs);
    } else {
      store_words<AcrossEnd>(row + col, left, lane, packs);
    }
  }

 private:
  static constexpr int kWordBytes = 4;
  static constexpr bool kHalves = kStartBytes < kWordBytes;
  static constexpr int kWords = kVectorBytes / kWordBytes;  // of a pack
  static constexpr int kWordStride = kWarpSize * kWordBytes;

  template <typename T>
  static constexpr int kElements = kWordBytes / sizeof(T);  // of a word

  // Where a warp's packs are: all inside of the row, or some past its end.
  struct Inside {};
  struct AcrossEnd {};

  // `left` columns of the row from this lane's first one on.
  template <typename Place, typename T, int N, int kVectors, typename Col>
  __device__ __forceinline__ static void store_words(T* target, Col left, int lane,
                                                     const Pack<T, N> (&packs)[kVectors]) {
    constexpr bool kWhole = std::is_same_v<Place, Inside>;
    constexpr int kCount = kVectors * kWords;
    constexpr int kStep = kWarpSize * kElements<T>;
    if (!kHalves || reinterpret_cast<std::uintptr_t>(target) % kWordBytes == 0) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const std::uint32_t word = packs[k / kWords].words[k % kWords];
        store_if<1>(kWhole || left - k * kStep >= kElements<T>, target + k * kStep, &word);
        if constexpr (!kWhole && sizeof(T) < kWordBytes) {
          store_half_if(left - k * kStep == 1, target + k * kStep, word);
        }
      }
      return;
    }
    std::uint32_t carried = 0;  // in lane 0, the last lane's word before this one
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const std::uint32_t word = packs[k / kWords].words[k % kWords];
      const std::uint32_t before = __shfl_sync(kAllLanes, word, (lane + kWarpSize - 1) % kWarpSize);
      const std::uint32_t joined = __funnelshift_l(lane == 0 ? carried : before, word, 16);
      carried = before;
      const bool inside = kWhole || left > k * kStep;
      const bool first = k == 0 && lane == 0;
      store_if<1>(inside && !first, target + k * kStep - 1, &joined);
      if constexpr (!kWhole) {
        store_half_if(left == k * kStep && !first, target + k * kStep - 1, joined);
      }
      if (k == 0) {
        store_half_if(inside && first, target, word);
      }
    }
    const std::uint32_t last = packs[kVectors - 1].words[kWords - 1];
    store_half_if((kWhole || left > (kCount - 1) * kStep + 1) && lane == kWarpSize - 1,
                  target + (kCount - 1) * kStep + 1, last >> 16);
  }

  __device__ __forceinline__ static std::uint32_t load_shared_word(std::uint32_t address) {
    std::uint32_t word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
  }
  template <typename T>
  __device__ __forceinline__ static std::uint32_t load_halves(const T* at, bool low, bool high) {
    std::uint32_t word;
    asm volatile(
        "{\n"
        "  .reg .pred wanted_low, wanted_high;\n"
        "  .reg .b16 low, high;\n"
        "  mov.b16 low, 0;\n"
        "  mov.b16 high, 0;\n"
        "  setp.ne.b32 wanted_low, %2, 0;\n"
        "  setp.ne.b32 wanted_high, %3, 0;\n"
        "  @wanted_low ld.global.b16 low, [%1];\n"
        "  @wanted_high ld.global.b16 high, [%1 + 2];\n"
        "  mov.b32 %0, {low, high};\n"
        "}"
        : "=r"(word)
        : "l"(at), "r"(static_cast<int>(low)), "r"(static_cast<int>(high))
        : "memory");
    return word;
  }
  template <typename T>
  __device__ __forceinline__ static void store_half_if(bool wanted, T* at, std::uint32_t word) {
    asm volatile(
        "{\n"
        "  .reg .pred wanted;\n"
        "  setp.ne.b32 wanted, %0, 0;\n"
        "  @wanted st.global.b16 [%1], %2;\n"
        "}" ::"r"(static_cast<int>(wanted)),
        "l"(at), "h"(static_cast<std::uint16_t>(word))
        : "memory");
  }
};
template <int kStartBytes, typename T, int N>
constexpr int kRun<WordAccess<kStartBytes>, T, N> = 4 / sizeof(T);

// Access of the same rows in packs of neighbouring elements.
template <typename Access>
struct NeighboursOf {
  using type = Access;
};
template <int kStartBytes>
struct NeighboursOf<WordAccess<kStartBytes>> {
  using type = ShiftedAccess;
};
template <typename Access>
using NeighbourAccess = typename NeighboursOf<Access>::type;

// Weight for a lane's pack of N elements T; ones where it is absent, zeros past the last column
// where rows share blocks.
template <typename W, typename T, int N, typename Access>
__device__ __forceinline__ auto lane_weight(const NormBackwardArgs& args, int col, int width) {
  constexpr int kElements = kRun<Access, T, N>;
  using P = typename ParameterOf<W>::type;
  const auto run_at = [&]<int kCount>(int at) {
    return parameters_of<W, kCount>(args.weight, args.param_dtype, at, width, 1);
  };
  if constexpr (kElements == N) {
    Pack<P, N> pack = run_at.template operator()<N>(col);
    if constexpr (Access::kSharesBlocks) {
      Access::clip(width - col, pack);
    }
    return pack;
  } else {
    P values[N];
#pragma unroll
    for (int first = 0; first < N; first += kElements) {
      const int at = col + first * kWarpSize;
      const Pack<P, kElements> run = run_at.template operator()<kElements>(at);
      memcpy(values + first, run.words, sizeof(run.words));
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        values[first + j] = at + j < width ? values[first + j] : P(0);
      }
    }
    return as_pack(values);
  }
}

}  // namespace fused_op::cuda
