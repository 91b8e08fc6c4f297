// How the GPU reads and writes packs of a row: access policies as core/pack.h describes them. The
// launcher picks one per call; both give element j of a row to the same lane, so results agree bit
// for bit. `width` 0 makes an access void. Torch-free.
#pragma once

#include "core/pack.h"

namespace fused_op::cuda {

// Every row begins at a multiple of 16 bytes and is a whole number of packs long: a pack is wholly
// inside or wholly outside, and moves in one instruction.
struct VectorAccess {
  static constexpr bool kWholePacks = true;

  template <int N, typename T, typename Col>
  __device__ __forceinline__ static Pack<T, N> load(const T* row, Col col, Col width) {
    return col < width ? *reinterpret_cast<const Pack<T, N>*>(row + col) : Pack<T, N>{};
  }
  // From the row's 16-byte blocks in shared memory.
  template <int N, typename T>
  __device__ __forceinline__ static Pack<T, N> load_staged(const uint4* blocks, int, int) {
    return *reinterpret_cast<const Pack<T, N>*>(blocks);
  }
  template <typename T, int N, typename Col>
  __device__ __forceinline__ static void store(T* row, Col col, Col width, const Pack<T, N>& pack) {
    if (col < width) {
      *reinterpret_cast<Pack<T, N>*>(row + col) = pack;
    }
  }
  template <int kLanes, typename T, int N, int kVectors, typename Col>
  __device__ __forceinline__ static void store_row(T* row, Col col, Col width,
                                                   const Pack<T, N> (&packs)[kVectors]) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      store(row, col + i * kLanes * N, width, packs[i]);
    }
  }
};

// Rows of any length at any element-aligned address, at the speed of whole vectors. A pack lies
// across two aligned 16-byte blocks: both are read, of those that hold an element of the row, and
// shifted together; neighbouring lanes exchange their packs to write aligned blocks.
struct ShiftedAccess {
  static constexpr bool kWholePacks = false;

  template <int N, typename T, typename Col>
  __device__ __forceinline__ static Pack<T, N> load(const T* row, Col col, Col width) {
    const auto begin = reinterpret_cast<std::uintptr_t>(row + col);
    const int shift = static_cast<int>(begin % kVectorBytes);
    const auto* const blocks = reinterpret_cast<const uint4*>(begin - shift);
    const int valid = static_cast<int>(min(width - col, static_cast<Col>(N)));
    std::uint32_t words[8];
    const uint4 low = valid > 0 ? blocks[0] : uint4{};
    const uint4 high = shift + valid * static_cast<int>(sizeof(T)) > kVectorBytes && valid > 0
                           ? blocks[1]
                           : uint4{};
    memcpy(words, &low, sizeof(low));
    memcpy(words + 4, &high, sizeof(high));
    return shifted<N, T>(words, shift, valid);
  }
  template <int N, typename T>
  __device__ __forceinline__ static Pack<T, N> load_staged(const uint4* blocks, int shift,
                                                           int valid) {
    std::uint32_t words[8];
    memcpy(words, blocks, 2 * sizeof(uint4));
    return shifted<N, T>(words, shift, valid);
  }

  // All 32 lanes call. A lane writes the aligned blocks in which its packs begin; the first
  // elements of such a block are the last ones of the pack before it.
  template <int kLanes, typename T, int N, int kVectors, typename Col>
  __device__ __forceinline__ static void store_row(T* row, Col col, Col width,
                                                   const Pack<T, N> (&packs)[kVectors]) {
    constexpr int kItem = sizeof(T);
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const auto begin = reinterpret_cast<std::uintptr_t>(row + col);
    const int shift = static_cast<int>(begin % kVectorBytes);
    std::uint32_t carried[4] = {};  // in lane 0: the last lane's pack of the vector before
#pragma unroll
    for (int i = 0; i <= kVectors; ++i) {  // the last turn is for what the last pack leaves over
      std::uint32_t words[8] = {};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        words[k] = carried[k];
        if (i < kVectors) {
          carried[k] =
              __shfl_sync(0xffffffffu, packs[i].words[k], (lane + kLanes - 1) % kLanes, kLanes);
          words[k] = lane == 0 ? words[k] : carried[k];
          words[4 + k] = packs[i].words[k];
        }
      }
      const Pack<T, N> block = shifted_back<N, T>(words, shift);
      // Bytes of the block that belong to this row and to these packs.
      const Col left = width - (col + i * kLanes * N);
      const int end = shift + static_cast<int>(max(min(left, Col{N}), -Col{N})) * kItem;
      const int first = i == 0 && lane == 0 ? shift : 0;
      const int last = i < kVectors ? min(end, kVectorBytes) : lane == 0 ? min(end, shift) : 0;
      T* const target = reinterpret_cast<T*>(begin - shift) + i * kLanes * N;
      if (last - first == kVectorBytes) {
        *reinterpret_cast<Pack<T, N>*>(target) = block;
      } else if (first < last) {
        T values[N];
        memcpy(values, block.words, sizeof(block.words));
#pragma unroll
        for (int j = 0; j < N; ++j) {
          if (j * kItem >= first && j * kItem < last) {
            target[j] = values[j];
          }
        }
      }
    }
  }

  // Zeros from element `valid` on.
  template <typename T, int N>
  __device__ __forceinline__ static void clip(Pack<T, N>& pack, int valid) {
    if (valid < N) {
#pragma unroll
      for (int k = 0; k < static_cast<int>(sizeof(pack) / 4); ++k) {
        const int bytes = valid * static_cast<int>(sizeof(T)) - 4 * k;
        pack.words[k] &= bytes >= 4 ? ~0u : bytes == 2 ? 0xffffu : 0u;
      }
    }
  }

 private:
  // The pack that begins `shift` bytes into two blocks, zeros from element `valid` on.
  template <int N, typename T>
  __device__ __forceinline__ static Pack<T, N> shifted(std::uint32_t (&words)[8], int shift,
                                                       int valid) {
#pragma unroll
    for (int k = 0; k < 6; ++k) {
      words[k] = (shift & 8) != 0 ? words[k + 2] : words[k];
    }
#pragma unroll
    for (int k = 0; k < 5; ++k) {
      words[k] = (shift & 4) != 0 ? words[k + 1] : words[k];
    }
    Pack<T, N> pack;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      pack.words[k] = sizeof(T) < 4 ? __funnelshift_r(words[k], words[k + 1], shift * 8) : words[k];
    }
    clip(pack, valid);
    return pack;
  }
  // The block that ends `shift` bytes before two packs do.
  template <int N, typename T>
  __device__ __forceinline__ static Pack<T, N> shifted_back(std::uint32_t (&words)[8], int shift) {
#pragma unroll
    for (int k = 7; k >= 2; --k) {
      words[k] = (shift & 8) != 0 ? words[k - 2] : words[k];
    }
#pragma unroll
    for (int k = 7; k >= 3; --k) {
      words[k] = (shift & 4) != 0 ? words[k - 1] : words[k];
    }
    Pack<T, N> pack;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      pack.words[k] =
          sizeof(T) < 4 ? __funnelshift_l(words[3 + k], words[4 + k], shift * 8) : words[4 + k];
    }
    return pack;
  }
};

// How many of the `most` columns from `col` on are in the row.
__device__ __forceinline__ int valid_elements(std::int64_t col, std::int64_t cols, int most) {
  const std::int64_t left = cols - col;
  return left <= 0 ? 0 : left < most ? static_cast<int>(left) : most;
}

// A pack of parameters, which begin at a multiple of 16 bytes. Absent ones (null) are `absent`
// everywhere; past the last column the pack holds anything.
template <int N, typename W, typename Col>
__device__ __forceinline__ Pack<W, N> load_parameters(const W* parameters, Col col, Col width,
                                                      float absent) {
  constexpr int kBlock = kVectorBytes / sizeof(W);
  Pack<W, N> pack{};
  if (parameters != nullptr) {
#pragma unroll
    for (int part = 0; part < N / kBlock; ++part) {
      if (col + part * kBlock < width) {
        memcpy(pack.words + 4 * part,
               __builtin_assume_aligned(parameters + col + part * kBlock, 16), kVectorBytes);
      }
    }
    return pack;
  }
  W values[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    values[j] = static_cast<W>(absent);
  }
  return as_pack(values);
}

}  // namespace fused_op::cuda
