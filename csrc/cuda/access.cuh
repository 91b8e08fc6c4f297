// How lanes access memory: which packs of a row belong to a lane, and two ways to move them.
// Vectors moves a pack in one instruction. Words (words.cuh) moves rows of any length at any
// address, by words of 4 bytes. Which elements a lane has depends only on the row's length and
// type, never on its address, so both give the same bits. Device code; torch-free.
#pragma once

#include "core/convert.h"
#include "core/pack.h"
#include "cuda/dependent_launch.cuh"
#include "cuda/memory.cuh"

namespace fused_op::cuda {

// How many threads any SM of the architecture holds.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kMostSmThreads = 1024;
#else
constexpr int kMostSmThreads = 1536;
#endif

// For __launch_bounds__: as many CTAs as an SM of the architecture has threads for, up to `most`.
// ptxas would ignore a larger number.
constexpr int ctas_with_room(int most, int threads) {
  return most * threads <= kMostSmThreads ? most : kMostSmThreads / threads;
}

// The packs of one lane: pack i begins kStep_ columns after pack i - 1. In every lane, the first
// kSure_ lie inside the row; only the others need a bounds check.
template <int kLanes_, int kStep_, int kSure_, bool kKeep_>
struct Lane {
  static constexpr int kLanes = kLanes_;  // neighbouring lanes of a row
  static constexpr int kStep = kStep_;
  static constexpr int kSure = kSure_;
  static constexpr bool kKeep = kKeep_;  // L2 evicts the row last: see evict_last()

  int first;  // column of pack 0
  int width;  // columns of the row
  bool live;  // false in lanes past the last row, which load another row and store nothing

  __device__ __forceinline__ int col(int i) const { return first + i * kStep; }
  // The number of elements from the start of pack i to the end of the row: N for the packs that
  // surely lie inside the row. For the others it may be larger than N, or negative.
  template <int N>
  __device__ __forceinline__ int valid(int i) const {
    return i < kSure ? N : width - col(i);
  }
};

// The tile as a warp sees it whose packs all lie inside the row.
template <typename Tile>
struct FullWarp : Tile {
  static constexpr bool kFull = true;
  static constexpr int kSure = Tile::kVectors;
};
// Whether all warps of a row but the last have code of their own, as FullWarp. Only in calls that
// were timed so: the code has to be short enough for the instruction cache to hold both.
template <typename Op>
constexpr bool kHasFullWarps = false;
// Whether only the last warp of a row has packs past its end.
template <typename Tile>
constexpr bool kLastWarpDiffers = Tile::kWarps > 1 && Tile::kSure < Tile::kVectors;

// Loads bytes of global memory as words, if `wanted`; otherwise the words stay as they are.
template <int kBytes, bool kKeep>
__device__ __forceinline__ void load_bytes_if(bool wanted, const void* at, std::uint32_t* words) {
  static_assert(kBytes == 2 || kBytes == 4 || kBytes == 8 || kBytes == 16 || kBytes == 32);
  if constexpr (kBytes == 32) {
    load_bytes_if<16, kKeep>(wanted, at, words);
    load_bytes_if<16, kKeep>(wanted, static_cast<const char*>(at) + 16, words + 4);
  } else if constexpr (kBytes == 2) {
    load_half_if(wanted, at, words);
  } else if constexpr (kKeep && kBytes != 8) {
    load_kept_if<kBytes / 4>(wanted, at, words);
  } else {
    load_if<kBytes / 4>(wanted, at, words);
  }
}
template <int kBytes>
__device__ __forceinline__ void store_bytes(void* at, const std::uint32_t* words) {
  if constexpr (kBytes == 32) {
    store_bytes<16>(at, words);
    store_bytes<16>(static_cast<char*>(at) + 16, words + 4);
  } else if constexpr (kBytes == 16) {
    *static_cast<uint4*>(at) = {words[0], words[1], words[2], words[3]};
  } else if constexpr (kBytes == 8) {
    *static_cast<uint2*>(at) = {words[0], words[1]};
  } else if constexpr (kBytes == 4) {
    *static_cast<std::uint32_t*>(at) = words[0];
  } else {
    *static_cast<std::uint16_t*>(at) = static_cast<std::uint16_t>(words[0]);
  }
}

// The same for global memory, if `wanted`. Unlike store_bytes(), it keeps a vector whole: in an
// unrolled loop with branches, the compiler may store it word by word. H200, bf16, share of copy of
// a group norm with silu, so and with store_bytes(): 0.70 0.49 at 8x320x64x64; share of add of
// backward of a gated norm in 8 groups: 0.89 0.81 at 32768x4096.
template <int kBytes>
__device__ __forceinline__ void store_bytes_if(bool wanted, void* at, const std::uint32_t* words) {
  if constexpr (kBytes == 32) {
    store_if<4>(wanted, at, words);
    store_if<4>(wanted, static_cast<char*>(at) + 16, words + 4);
  } else if constexpr (kBytes >= 4) {
    store_if<kBytes / 4>(wanted, at, words);
  } else if (wanted) {
    store_bytes<kBytes>(at, words);
  }
}

// Makes the compiler forget what it knows of packs. Otherwise it would keep the unpacked elements,
// in twice the registers, until it needs them again.
template <typename Packs>
__device__ __forceinline__ void stay_packed(Packs& packs) {
  auto* const words = reinterpret_cast<std::uint32_t*>(&packs);
#pragma unroll
  for (int k = 0; k < static_cast<int>(sizeof(packs) / 4); ++k) {
    asm volatile("" : "+r"(words[k]));
  }
}

// Not `pack = {}`: NVRTC puts that temporary into global memory and loads it from there.
template <typename T, int N>
__device__ __forceinline__ void clear(Pack<T, N>& pack) {
#pragma unroll
  for (int k = 0; k < static_cast<int>(sizeof(pack) / 4); ++k) {
    pack.words[k] = 0;
  }
}

// One value, from memory if `wanted`, else 0.
template <typename A, typename T>
__device__ __forceinline__ A load_value(bool wanted, const T* from) {
  Pack<T, 1> pack;
  clear(pack);
  load_bytes_if<sizeof(T), false>(wanted, from, pack.words);
  A value[1];
  to_values(pack, value);
  return value[0];
}
template <typename T, typename A>
__device__ __forceinline__ void store_value(T* to, A value) {
  const A values[1] = {value};
  store_bytes<sizeof(T)>(to, rounded<T>(values).words);
}
// Stores a gradient of type W, or adds it to what is there, which is f32.
template <typename W, typename Index, typename A>
__device__ __forceinline__ void store_gradient(void* gradients, Index i, A value, bool add) {
  if (add) {
    static_cast<float*>(gradients)[i] += static_cast<float>(value);
  } else {
    store_value(static_cast<W*>(gradients) + i, value);
  }
}

// Both load a lane's packs by load(), or in two steps: join() waits for what start() has loaded,
// and takes what start() returned. Other loads may be started between them.

// What the accesses below have in common.
template <typename Access>
struct AnyAccess {
  // A pack whose elements all have this value.
  template <typename T, int N>
  __device__ __forceinline__ static Pack<T, N> pack_of(float value) {
    Accumulator<T> values[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      values[j] = value;
    }
    return rounded<T>(values);
  }
  // A pack of a parameter, as below; if that is null, all values are `absent`.
  template <typename W, int N, typename Col>
  __device__ __forceinline__ static Pack<W, N> parameter(const void* from, Col col, int valid,
                                                         float absent) {
    return Access::parameter(from, col, valid, pack_of<W, N>(absent));
  }
  // Two rows: the loads of both are started before one is waited for.
  template <typename Lane, typename T, typename U, int N, int kVectors>
  __device__ __forceinline__ static void load_both(const Lane& lane, const T* row,
                                                   Pack<T, N> (&packs)[kVectors], const U* other,
                                                   Pack<U, N> (&others)[kVectors]) {
    const std::uint32_t of_row = Access::start(lane, row, packs);
    const std::uint32_t of_other = Access::start(lane, other, others);
    Access::join(lane, row, packs, of_row);
    Access::join(lane, other, others, of_other);
  }
};

// For rows that begin at a multiple of a pack's bytes (16 at most) and are whole packs long.
struct Vectors : AnyAccess<Vectors> {
  using AnyAccess<Vectors>::parameter;
  static constexpr bool kWhole = true;  // a pack is wholly inside the row or wholly outside
  static constexpr bool kStoresTogether = false;

  template <typename T>
  __device__ __forceinline__ static constexpr bool stores_together(const T*) {
    return false;
  }

  template <typename Lane, typename T, int N, int kVectors>
  __device__ __forceinline__ static void load(const Lane& lane, const T* row,
                                              Pack<T, N> (&packs)[kVectors]) {
    const T* const from = row + lane.first;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      clear(packs[i]);
      load_bytes_if<sizeof(T) * N, Lane::kKeep>(lane.template valid<N>(i) > 0,
                                                from + i * Lane::kStep, packs[i].words);
    }
  }
  template <typename Lane, typename T, int N, int kVectors>
  __device__ __forceinline__ static std::uint32_t start(const Lane& lane, const T* row,
                                                        Pack<T, N> (&packs)[kVectors]) {
    load(lane, row, packs);
    return 0;
  }
  template <typename Lane, typename T, int N, int kVectors>
  __device__ __forceinline__ static void join(const Lane&, const T*, Pack<T, N> (&)[kVectors],
                                              std::uint32_t) {}
  template <typename Lane, typename T, int N>
  __device__ __forceinline__ static void store_pack(const Lane& lane, T* row, int i,
                                                    const Pack<T, N>& pack) {
    T* const to = row + lane.first;
    store_bytes_if<sizeof(T) * N>(lane.live && lane.template valid<N>(i) > 0, to + i * Lane::kStep,
                                  pack.words);
  }
  template <typename Lane, typename T, int N, int kVectors>
  __device__ __forceinline__ static void store(const Lane& lane, T* row,
                                               const Pack<T, N> (&packs)[kVectors]) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      store_pack(lane, row, i, packs[i]);
    }
  }
  // Prefetches a row without reading it: see prefetch().
  template <int kVectors, typename Lane, typename T>
  __device__ __forceinline__ static void prefetch_row(const Lane& lane, const T* row) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (lane.template valid<1>(i) > 0) {
        prefetch(row + lane.col(i));
      }
    }
  }
  // Stores packs that are the lane's packs from `first` on.
  template <typename Lane, typename T, int N, int kCount>
  __device__ __forceinline__ static void store_some(const Lane& lane, T* row, int first,
                                                    const Pack<T, N> (&packs)[kCount]) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      store_bytes_if<sizeof(T) * N>(lane.live && lane.template valid<N>(first + k) > 0,
                                    row + lane.col(first + k), packs[k].words);
    }
  }
  // Loads N values of a parameter from column `col` on. The parameter begins at a multiple of a
  // pack's bytes, 16 at most, and of 4 for Words; if it is null, the values are those of `absent`.
  // `valid` is the number of columns left in the row; if it is N, there may be more.
  template <typename W, int N, typename Col>
  __device__ __forceinline__ static Pack<W, N> parameter(const void* from, Col col, int valid,
                                                         Pack<W, N> absent) {
    load_bytes_if<sizeof(W) * N, false>(from != nullptr && valid > 0,
                                        static_cast<const W*>(from) + col, absent.words);
    return absent;
  }
};

}  // namespace fused_op::cuda
