// Which rows and lanes a thread of forward_flat_kernel has, and the span of memory that they lie
// in. Device code; torch-free.
#pragma once

#include <type_traits>

#include "cuda/access.cuh"
#include "cuda/forward_layout.h"
#include "cuda/memory.cuh"
#include "cuda/words.cuh"

namespace fused_op::cuda {

// A row of kCols columns has kLanes lanes, each with every kLanes-th pack of kPack elements. Each
// of its kThreads threads has the packs of every kThreads-th lane, and of kRows rows in turn.
template <int kPack_, int kLanes_, int kThreads_, int kRows_, int kVectorRows_, int kCtasPerSm_,
          int kCols_>
struct FlatTile {
  static constexpr int kPack = kPack_;
  static constexpr int kLanes = kLanes_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kRows = kRows_;
  // Rows that fill a vector, which a thread takes at once, in registers; 0: rows go through shared
  // memory. us of 4194304 rows that way and so: 14.6 11.6 with 2 columns, 24.1 18.2 with 4 (H200,
  // bf16, LayerNorm).
  static constexpr int kVectorRows = kVectorRows_;
  static constexpr int kCtasPerSm = ctas_with_room(kCtasPerSm_, kFlatThreads);
  static constexpr int kCols = kCols_;
  static constexpr int kOwnLanes = kLanes / kThreads;  // of a thread
  static constexpr int kStep = kLanes * kPack;
  static constexpr int kVectors = (kCols + kStep - 1) / kStep;  // packs of a lane
  static constexpr int kWarpRows = kWarpSize / kThreads;
  static constexpr int kWarpTurns = kFlatThreads / kWarpSize * kRows;  // of all warps
  static constexpr int kCtaRows = kWarpTurns * kWarpRows;
  // Vectors of 16 bytes that a thread copies, at most.
  template <typename T>
  static constexpr int kCopies =
      (kCtaRows * kCols + kFlatThreads * kVector<T> - 1) / (kFlatThreads * kVector<T>);
  using RowLane = Lane<kLanes, kStep, kCols / kStep, false>;
  using Access = std::conditional_t<kCols % kPack == 0, Vectors, Words>;  // for parameters

  // The thread's row in the CTA, in its turn `turn`. The rows that a warp has at once are so far
  // apart that they begin in different banks of shared memory: neighbours at 63 columns of two
  // bytes, with eight threads each, would share eight banks.
  template <typename T>
  __device__ __forceinline__ static int row(int turn) {
    constexpr int kBytes = kCols * static_cast<int>(sizeof(T));
    constexpr int kPieces = kBytes & -kBytes;  // of so many bytes a row is an odd number
    constexpr int kAccess = kCols % kPack == 0 ? kPack * static_cast<int>(sizeof(T)) : 4;
    constexpr int kWanted = kThreads * kAccess / kPieces;
    constexpr int kApart = kWanted < 1 ? 1 : kWanted < kWarpTurns ? kWanted : kWarpTurns;
    static_assert(kWarpTurns % kApart == 0, "each row of the CTA is some warp's");
    const int thread = static_cast<int>(threadIdx.x);
    const int warp_turn = turn * (kFlatThreads / kWarpSize) + thread / kWarpSize;
    const int in_warp = thread % kWarpSize / kThreads;
    return warp_turn / kApart * (kApart * kWarpRows) + warp_turn % kApart + in_warp * kApart;
  }
  // The thread's lane `own`.
  __device__ __forceinline__ static RowLane lane(int own) {
    const int number = static_cast<int>(threadIdx.x) % kThreads + own * kThreads;
    return {number * kPack, kCols, true};
  }
  // Calls visit(own, i, lane) for each pack i of each lane of the thread.
  template <typename Visit>
  __device__ __forceinline__ static void each_pack(Visit&& visit) {
#pragma unroll
    for (int own = 0; own < kOwnLanes; ++own) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        visit(own, i, lane(own));
      }
    }
  }
};

// Rows that lie one after another: those of a CTA in shared or global memory, or those of a vector
// in registers.
template <typename Tile, typename T>
struct FlatSpan {
  static constexpr int N = Tile::kPack;
  static constexpr int kBytes = N * static_cast<int>(sizeof(T));
  // Rows of an odd number of 16-bit elements may begin in the middle of a word.
  static constexpr int kPiece = Tile::kCols % N == 0 ? kBytes : static_cast<int>(sizeof(T));

  uint4* vectors;

  __device__ __forceinline__ char* at(int row, int col) const {
    return reinterpret_cast<char*>(vectors) + (row * Tile::kCols + col) * int{sizeof(T)};
  }
  // The lane's pack i of a row.
  template <typename Lane>
  __device__ __forceinline__ Pack<T, N> load(int row, const Lane& lane, int i) const {
    Pack<T, N> pack;
    clear(pack);
#pragma unroll
    for (int k = 0; k < kBytes / kPiece; ++k) {
      if (lane.template valid<N>(i) > k * (kPiece / int{sizeof(T)})) {
        copy(reinterpret_cast<char*>(pack.words) + k * kPiece, at(row, lane.col(i)) + k * kPiece);
      }
    }
    return pack;
  }
  template <typename Lane>
  __device__ __forceinline__ void store(int row, const Lane& lane, int i,
                                        const Pack<T, N>& pack) const {
#pragma unroll
    for (int k = 0; k < kBytes / kPiece; ++k) {
      if (lane.template valid<N>(i) > k * (kPiece / int{sizeof(T)})) {
        copy(at(row, lane.col(i)) + k * kPiece,
             reinterpret_cast<const char*>(pack.words) + k * kPiece);
      }
    }
  }
  // Copies `span` elements of global memory, which begin there at a multiple of 16 bytes. All
  // threads of the CTA take part.
  __device__ __forceinline__ void read(const T* from, int span) const {
    constexpr int kElements = kVector<T>;
    uint4 words[Tile::template kCopies<T>];
#pragma unroll
    for (int i = 0; i < Tile::template kCopies<T>; ++i) {
      const int first = (i * kFlatThreads + static_cast<int>(threadIdx.x)) * kElements;
      load_if<4>(first + kElements <= span, from + first,
                 reinterpret_cast<std::uint32_t*>(&words[i]));
    }
#pragma unroll
    for (int i = 0; i < Tile::template kCopies<T>; ++i) {
      const int vector = i * kFlatThreads + static_cast<int>(threadIdx.x);
      if ((vector + 1) * kElements <= span) {
        vectors[vector] = words[i];
      }
    }
    const int rest = span / kElements * kElements + static_cast<int>(threadIdx.x);
    if (rest < span) {
      reinterpret_cast<T*>(vectors)[rest] = from[rest];
    }
  }
  __device__ __forceinline__ void write(T* to, int span) const {
    constexpr int kElements = kVector<T>;
#pragma unroll
    for (int i = 0; i < Tile::template kCopies<T>; ++i) {
      const int vector = i * kFlatThreads + static_cast<int>(threadIdx.x);
      if ((vector + 1) * kElements <= span) {
        reinterpret_cast<uint4*>(to)[vector] = vectors[vector];
      }
    }
    const int rest = span / kElements * kElements + static_cast<int>(threadIdx.x);
    if (rest < span) {
      to[rest] = reinterpret_cast<const T*>(vectors)[rest];
    }
  }

 private:
  __device__ __forceinline__ static void copy(char* to, const char* from) {
    if constexpr (kPiece == 2) {
      *reinterpret_cast<std::uint16_t*>(to) = *reinterpret_cast<const std::uint16_t*>(from);
    } else if constexpr (kPiece == 4) {
      *reinterpret_cast<std::uint32_t*>(to) = *reinterpret_cast<const std::uint32_t*>(from);
    } else if constexpr (kPiece == 8) {
      *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from);
    } else {
      static_assert(kPiece == 16);
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    }
  }
};

}  // namespace fused_op::cuda
