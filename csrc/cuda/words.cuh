// How lanes access rows that are not whole vectors or begin between them: by words of 4 bytes. See
// access.cuh, which has the other way. Device code; torch-free.
#pragma once

#include "cuda/access.cuh"

namespace fused_op::cuda {

// For rows of any length, at any address that is a multiple of the element size. A 16-bit row that
// begins in the middle of a word moves by halves. The branch is the same for the whole row.
struct Words : AnyAccess<Words> {
  using AnyAccess<Words>::parameter;
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
    if constexpr (sizeof(T) == 2 && N == 2) {
      return load_around(lane, row + lane.first, packs);
    } else {
      load_each(lane, row, packs);
      return 0;
    }
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
          packs[i].words[0] = ends_within(lane, i, splits) ? half : packs[i].words[0];
        }
      }
    }
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
                                                         Pack<W, N> absent) {
    load_pack<false, false, false>(static_cast<const W*>(from) + col, from != nullptr ? valid : 0,
                                   absent);
    return absent;
  }

 private:
  template <typename T>
  __device__ __forceinline__ static bool splits_word(const T* at) {
    return sizeof(T) == 2 && reinterpret_cast<std::uintptr_t>(at) % 4 != 0;
  }

  // Whether the row ends in the middle of the aligned word in which pack i begins.
  template <typename Lane>
  __device__ __forceinline__ static bool ends_within(const Lane& lane, int i, bool splits) {
    return lane.template valid<2>(i) + (splits ? 1 : 0) == 1;
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
    static_assert((Lane::kLanes & (Lane::kLanes - 1)) == 0, "the next lane is found by a shuffle");
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
      ends |= ends_within(lane, i, before == 1);
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
      packs[i].words[0] = ends_within(lane, i, splits) ? half : packs[i].words[0];
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
  // Loads packs by themselves, and nothing but the row.
  template <typename Lane, typename T, int N, int kVectors>
  __device__ __forceinline__ static void load_each(const Lane& lane, const T* row,
                                                   Pack<T, N> (&packs)[kVectors]) {
    const T* const from = row + lane.first;
    if (!splits_word(from)) {
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
  }

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

// Words that load nothing but the row. The others may load the half before it as well, which
// another warp may be about to store if the kernel writes rows and reads them again.
struct LoneWords : Words {
  template <typename Lane, typename T, int N, int kVectors>
  __device__ __forceinline__ static void load(const Lane& lane, const T* row,
                                              Pack<T, N> (&packs)[kVectors]) {
    Words::load_each(lane, row, packs);
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
