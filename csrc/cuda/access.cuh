// How lanes access memory: which packs of a row belong to a lane, and two ways to move them.
// Vectors moves a pack in one instruction. Words moves rows of any length at any address, by words
// of 4 bytes. Which elements a lane has depends only on the row's length and type, never on its
// address, so both give the same bits. Device code; torch-free.
#pragma once

#include "core/convert.h"
#include "core/pack.h"
#include "cuda/dependent_launch.cuh"
#include "cuda/memory.cuh"

namespace fused_op::cuda {

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

// Not `pack = {}`: NVRTC puts that temporary into global memory and loads it from there.
template <typename T, int N>
__device__ __forceinline__ void clear(Pack<T, N>& pack) {
#pragma unroll
  for (int k = 0; k < static_cast<int>(sizeof(pack) / 4); ++k) {
    pack.words[k] = 0;
  }
}

// A pack whose elements all have this value.
template <typename T, int N>
__device__ __forceinline__ Pack<T, N> pack_of(float value) {
  Accumulator<T> values[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    values[j] = value;
  }
  return rounded<T>(values);
}

// Both load a lane's packs by load(), or in two steps: join() waits for what start() has loaded,
// and takes what start() returned. Other loads may be started between them.

// For rows that begin at a multiple of a pack's bytes (16 at most) and are whole packs long.
struct Vectors {
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
  // Two rows.
  template <typename Lane, typename T, typename U, int N, int kVectors>
  __device__ __forceinline__ static void load_both(const Lane& lane, const T* row,
                                                   Pack<T, N> (&packs)[kVectors], const U* other,
                                                   Pack<U, N> (&others)[kVectors]) {
    const std::uint32_t of_row = start(lane, row, packs);
    const std::uint32_t of_other = start(lane, other, others);
    join(lane, row, packs, of_row);
    join(lane, other, others, of_other);
  }
  template <typename Lane, typename T, int N>
  __device__ __forceinline__ static void store_pack(const Lane& lane, T* row, int i,
                                                    const Pack<T, N>& pack) {
    if (lane.live && lane.template valid<N>(i) > 0) {
      store_bytes<sizeof(T) * N>(row + lane.col(i), pack.words);
    }
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
      store_pack(lane, row, first + k, packs[k]);
    }
  }
  // Loads N values of a parameter from column `col` on. The parameter begins at a multiple of 16
  // bytes; if it is null, all values are `absent`. `valid` is the number of columns left in the
  // row; if it is N, there may be more.
  template <typename W, int N, typename Col>
  __device__ __forceinline__ static Pack<W, N> parameter(const void* from, Col col, int valid,
                                                         float absent) {
    Pack<W, N> pack = pack_of<W, N>(absent);
    load_bytes_if<sizeof(W) * N, false>(from != nullptr && valid > 0,
                                        static_cast<const W*>(from) + col, pack.words);
    return pack;
  }
};

// For rows of any length, at any address that is a multiple of the element size. A 16-bit row that
// begins in the middle of a word moves by halves. The branch is the same for the whole row.
struct Words {
  static constexpr bool kWhole = false;
  static constexpr bool kStoresTogether = true;  // packs are stored in one branch, not in one each
  static constexpr bool kHalves = true;          // rows may begin in the middle of a word

  // Whether the packs of a row at `to` are stored together, because lanes exchange halves.
  template <typename T>
  __device__ __forceinline__ static bool stores_together(const T* to) {
    return splits_word(to);
  }

  template <typename Lane, typename T, int N, int kVectors>
  __device__ __forceinline__ static void load(const Lane& lane, const T* row,
                                              Pack<T, N> (&packs)[kVectors]) {
    join(lane, row, packs, start(lane, row, packs));
  }
  // Starts the loads of a row, and join() makes packs of what they return; all lanes of a warp call
  // both. A 16-bit row is loaded alike wherever it begins, because a second load into a register
  // would wait for the first.
  template <typename Lane, typename T, int N, int kVectors>
  __device__ __forceinline__ static std::uint32_t start(const Lane& lane, const T* row,
                                                        Pack<T, N> (&packs)[kVectors]) {
    const T* const from = row + lane.first;
    if constexpr (sizeof(T) == 2 && N == 2) {
      return load_around(lane, from, packs);
    } else if (!splits_word(from)) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        clear(packs[i]);
        load_pack<false, Lane::kKeep, true>(from + i * Lane::kStep, lane.template valid<N>(i),
                                            packs[i]);
      }
    } else if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        clear(packs[i]);
        load_pack<true, Lane::kKeep, true>(from + i * Lane::kStep, lane.template valid<N>(i),
                                           packs[i]);
      }
    }
    return 0;
  }
  template <typename Lane, typename T, int N, int kVectors>
  __device__ __forceinline__ static void join(const Lane& lane, const T* row,
                                              Pack<T, N> (&packs)[kVectors], std::uint32_t half) {
    if constexpr (sizeof(T) == 2 && N == 2) {
      const bool splits = splits_word(row + lane.first);
      if (Lane::kLanes == 32 ? splits : __any_sync(0xffffffffu, splits)) {
        join_halves(lane, packs, splits, half);
      } else {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          packs[i].words[0] = lane.template valid<2>(i) == 1 ? half : packs[i].words[0];
        }
      }
    }
  }
  // Two rows: the loads of both are started before one is waited for.
  template <typename Lane, typename T, typename U, int N, int kVectors>
  __device__ __forceinline__ static void load_both(const Lane& lane, const T* row,
                                                   Pack<T, N> (&packs)[kVectors], const U* other,
                                                   Pack<U, N> (&others)[kVectors]) {
    const std::uint32_t of_row = start(lane, row, packs);
    const std::uint32_t of_other = start(lane, other, others);
    join(lane, row, packs, of_row);
    join(lane, other, others, of_other);
  }
  // For a row that begins at a word.
  template <typename Lane, typename T, int N>
  __device__ __forceinline__ static void store_pack(const Lane& lane, T* row, int i,
                                                    const Pack<T, N>& pack) {
    store_at<false>(row + lane.col(i), lane.live ? lane.template valid<N>(i) : 0, pack);
  }
  template <typename Lane, typename T, int N, int kVectors>
  __device__ __forceinline__ static void store(const Lane& lane, T* row,
                                               const Pack<T, N> (&packs)[kVectors]) {
    T* const to = row + lane.first;
    if (!splits_word(to)) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        store_pack(lane, row, i, packs[i]);
      }
    } else if constexpr (sizeof(T) == 2 && N == 2) {
      store_joined(lane, to, packs);
    } else if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        store_at<true>(to + i * Lane::kStep, lane.live ? lane.template valid<N>(i) : 0, packs[i]);
      }
    }
  }
  template <int kVectors, typename Lane, typename T>
  __device__ __forceinline__ static void prefetch_row(const Lane& lane, const T* row) {
    if (threadIdx.x % Lane::kLanes == 0) {  // pack i of all lanes is a line of 128 bytes at most
      Vectors::prefetch_row<kVectors>(lane, row);
    }
  }
  // Stores packs that are the lane's packs from `first` on.
  template <typename Lane, typename T, int N, int kCount>
  __device__ __forceinline__ static void store_some(const Lane& lane, T* row, int first,
                                                    const Pack<T, N> (&packs)[kCount]) {
    T* const to = row + lane.first;
    if (!splits_word(to)) {
      store_words<false>(lane, to, first, packs);
    } else if constexpr (sizeof(T) == 2) {
      store_words<true>(lane, to, first, packs);
    }
  }
  template <typename W, int N, typename Col>
  __device__ __forceinline__ static Pack<W, N> parameter(const void* from, Col col, int valid,
                                                         float absent) {
    Pack<W, N> pack = pack_of<W, N>(absent);
    load_pack<false, false, false>(static_cast<const W*>(from) + col, from != nullptr ? valid : 0,
                                   pack);
    return pack;
  }

 private:
  template <typename T>
  __device__ __forceinline__ static bool splits_word(const T* at) {
    return sizeof(T) == 2 && reinterpret_cast<std::uintptr_t>(at) % 4 != 0;
  }

  // The lanes of this lane's row, as a mask. They take the same branch, whereas other rows of the
  // warp may begin elsewhere in a word and take another one.
  template <typename Lane>
  __device__ __forceinline__ static unsigned lanes_of_row() {
    if constexpr (Lane::kLanes == 32) {
      return 0xffffffffu;
    } else {
      const unsigned first = threadIdx.x % 32u / Lane::kLanes * Lane::kLanes;
      return ((1u << Lane::kLanes) - 1u) << first;
    }
  }
  // A lane reads the aligned words in which its own words begin. Where the row ends in the middle
  // of one, it reads that half instead, and returns it; else the last lane returns the half behind
  // its words. (No lane needs both.)
  template <typename Lane, typename T, int kVectors>
  __device__ __forceinline__ static std::uint32_t load_around(const Lane& lane, const T* from,
                                                              Pack<T, 2> (&packs)[kVectors]) {
    constexpr int kLast = kVectors - 1;
    const int before = splits_word(from) ? 1 : 0;  // elements
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      clear(packs[i]);
      load_bytes_if<4, Lane::kKeep>(lane.template valid<2>(i) + before > 1,
                                    from + i * Lane::kStep - before, packs[i].words);
    }
    const auto left = lane.width - lane.first;  // elements of the row
    bool ends = false;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      ends |= lane.template valid<2>(i) + before == 1;
    }
    const bool is_last = static_cast<int>(threadIdx.x) % Lane::kLanes == Lane::kLanes - 1;
    const bool goes_on = before == 1 && is_last && lane.template valid<2>(kLast) > 1;
    std::uint32_t half = 0;
    load_half_if(ends || goes_on, from + (goes_on ? kLast * Lane::kStep + 1 : left - 1), &half);
    return half;
  }
  // It takes the other halves from the next lane, unless its own row begins at a word and shares
  // the warp with one that does not.
  template <typename Lane, typename T, int kVectors>
  __device__ __forceinline__ static void join_halves(const Lane& lane,
                                                     Pack<T, 2> (&packs)[kVectors], bool splits,
                                                     std::uint32_t half) {
    constexpr int kLanes = Lane::kLanes;
    constexpr int kLast = kVectors - 1;
    const int id = static_cast<int>(threadIdx.x) % kLanes;
    const unsigned bytes = splits ? 0x5432 : 0x3210;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const bool ends = lane.template valid<2>(i) + (splits ? 1 : 0) == 1;
      packs[i].words[0] = ends ? half : packs[i].words[0];
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const std::uint32_t word = packs[i].words[0];
      const std::uint32_t after = i < kLast ? packs[i < kLast ? i + 1 : i].words[0] : 0;
      const std::uint32_t offered = kLanes == 1 || id > 0 ? word : after;
      std::uint32_t next =
          kLanes == 1 ? after : __shfl_sync(0xffffffffu, offered, (id + 1) % kLanes, kLanes);
      if (i == kLast && id == kLanes - 1) {
        next = half;
      }
      const int valid = lane.template valid<2>(i);
      packs[i].words[0] = __byte_perm(word, next, bytes) & (valid > 1   ? ~0u
                                                            : valid > 0 ? 0xffffu
                                                                        : 0u);
    }
  }
  // A lane writes the aligned word in which its own word begins; the lower half of that is the
  // upper half of the previous lane's word. The first and the last half of the row are stored by
  // themselves.
  template <typename Lane, typename T, int kVectors>
  __device__ __forceinline__ static void store_joined(const Lane& lane, T* to,
                                                      const Pack<T, 2> (&packs)[kVectors]) {
    constexpr int kLanes = Lane::kLanes;
    const int id = static_cast<int>(threadIdx.x) % kLanes;
    const unsigned lanes = lanes_of_row<Lane>();
    std::uint32_t carried = 0;  // in lane 0: the last lane's previous word
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const std::uint32_t word = packs[i].words[0];
      const std::uint32_t before = __shfl_sync(lanes, word, (id + kLanes - 1) % kLanes, kLanes);
      const std::uint32_t joined = __funnelshift_l(id == 0 ? carried : before, word, 16);
      carried = before;
      const int valid = lane.live ? lane.template valid<2>(i) : -1;
      const bool first = i == 0 && id == 0;
      T* const at = to + i * Lane::kStep - 1;
      if (valid > 0 && !first) {
        store_bytes<4>(at, &joined);
      } else if (valid == 0 && !first) {
        store_bytes<2>(at, &joined);
      } else if (valid > 0 && first) {
        store_bytes<2>(to, &word);
      }
    }
    const std::uint32_t last = packs[kVectors - 1].words[0] >> 16;
    if (lane.live && id == kLanes - 1 && lane.template valid<2>(kVectors - 1) > 1) {
      store_bytes<2>(to + (kVectors - 1) * Lane::kStep + 1, &last);
    }
  }

  // Loads the first `valid` elements of a pack, or all if `valid` is larger. The others stay as
  // they are.
  template <bool kHalves, bool kKeep, bool kMasks, typename T, int N>
  __device__ __forceinline__ static void load_pack(const T* from, int valid, Pack<T, N>& pack) {
    if constexpr (sizeof(T) > 2) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        load_bytes_if<sizeof(T), kKeep && sizeof(T) == 4>(valid > j, from + j,
                                                          pack.words + j * sizeof(T) / 4);
      }
    } else if constexpr (N == 1) {
      load_bytes_if<2, false>(valid > 0, from, pack.words);
    } else {
#pragma unroll
      for (int j = 0; j < N; j += 2) {
        std::uint32_t& word = pack.words[j / 2];
        if constexpr (kHalves) {
          std::uint32_t high = 0;
          load_half_if(valid > j, from + j, &word);
          load_half_if(valid > j + 1, from + j + 1, &high);
          word = __byte_perm(word, high, 0x5410);
        } else {
          [[maybe_unused]] std::uint32_t half = 0;
          load_if<1>(valid > (N == 2 ? 1 : j), from + j, &word);
          if constexpr (N == 2) {  // not into the same register, which would be waited for
            load_half_if(valid == 1, from, &half);
            word = valid == 1 ? __byte_perm(half, word, 0x7610) : word;
          } else if constexpr (kMasks) {
            // A row with packs of several words ends at a word, so the mask changes nothing; but
            // ptxas spills without it. Parameters are not masked: the mask would clear every second
            // element of an absent one.
            word &= valid > j + 1 ? ~0u : 0xffffu;
          }
        }
      }
    }
  }

  template <bool kHalves, typename T, int N>
  __device__ __forceinline__ static void store_at(T* to, int valid, const Pack<T, N>& pack) {
    if constexpr (sizeof(T) > 2 || N == 1) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (valid > j) {
          store_bytes<sizeof(T)>(to + j, pack.words + j * sizeof(T) / 4);
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < N; j += 2) {
        const std::uint32_t word = pack.words[j / 2];
        const std::uint32_t high = word >> 16;
        if (!kHalves && valid > j + 1) {
          store_bytes<4>(to + j, &word);
        } else if (valid > j) {
          store_bytes<2>(to + j, &word);
        }
        if (kHalves && valid > j + 1) {
          store_bytes<2>(to + j + 1, &high);
        }
      }
    }
  }

 protected:
  template <bool kByHalves, typename Lane, typename T, int N, int kCount>
  __device__ __forceinline__ static void store_words(const Lane& lane, T* to, int first,
                                                     const Pack<T, N> (&packs)[kCount]) {
    if (lane.live) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        store_at<kByHalves>(to + (first + k) * Lane::kStep, lane.template valid<N>(first + k),
                            packs[k]);
      }
    }
  }
};

// Words for rows that all begin at a multiple of 4 bytes.
struct WholeWords : Words {
  static constexpr bool kHalves = false;

  template <typename Lane, typename T, int N, int kCount>
  __device__ __forceinline__ static void store_some(const Lane& lane, T* row, int first,
                                                    const Pack<T, N> (&packs)[kCount]) {
    Words::store_words<false>(lane, row + lane.first, first, packs);
  }
};

}  // namespace fused_op::cuda
