// How the GPU reads and writes packs of a row: access policies as core/pack.h describes them. The
// launcher picks one per call; both give element j of a row to the same lane, so results agree bit
// for bit. `width` 0 makes an access void. Torch-free.
#pragma once

#include <type_traits>

#include "core/pack.h"
#include "cuda/memory.cuh"

namespace fused_op::cuda {

// The compiler is not to unpack this sooner than here: registers would not suffice.
template <typename P>
__device__ __forceinline__ void stay_packed(P& pack) {
#pragma unroll
  for (int k = 0; k < static_cast<int>(sizeof(pack) / 4); ++k) {
    asm volatile("" : "+r"(pack.words[k]));
  }
}

// A pack of one value.
template <typename T, int N, typename A>
__device__ __forceinline__ Pack<T, N> filled(A value) {
  T values[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    values[j] = static_cast<T>(value);
  }
  return as_pack(values);
}

// Every row begins at a multiple of 16 bytes and is a whole number of packs long: a pack is wholly
// inside or wholly outside, and moves in one instruction.
struct VectorAccess {
  static constexpr bool kWholePacks = true;
  static constexpr bool kSharesBlocks = false;
  static constexpr bool kShifts = false;

  template <int N, typename T, typename Col>
  __device__ __forceinline__ static Pack<T, N> load(const T* row, Col col, Col width) {
    return col < width ? *reinterpret_cast<const Pack<T, N>*>(row + col) : Pack<T, N>{};
  }
  // From the row's 16-byte blocks, at an address in shared memory.
  template <int N, typename T>
  __device__ __forceinline__ static Pack<T, N> load_staged(std::uint32_t blocks, int) {
    Pack<T, N> pack;
    load_shared(blocks, pack.words);
    return pack;
  }
  template <typename Col, typename... Packs>
  __device__ __forceinline__ static void clip(Col, Packs&...) {}  // they loaded as zero
  template <typename A, typename Col, typename... Packs>
  __device__ __forceinline__ static void clip_to(A, Col, Packs&...) {}  // none lies past the end
  // (Evicted first, by st.global.cs: 129.1 130.8 us at 16384x8192, 4.3 4.7 at 4096x768, bf16,
  // H200.)
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

// The same, and the L2 cache evicts the rows last.
struct KeptAccess : VectorAccess {
  template <int N, typename T, typename Col>
  __device__ __forceinline__ static Pack<T, N> load(const T* row, Col col, Col width) {
    Pack<T, N> pack{};
    static_assert(sizeof(pack) == kVectorBytes);
    load_kept_if(col < width, row + col, pack.words);
    return pack;
  }
};

// The same where every lane has all of its vectors inside of a row that is there, and no parameter
// is absent: nothing is compared, and no default made. H200, LayerNorm, bf16, us by VectorAccess
// and so: 128.9 125.2 at 32768x4096, 129.0 125.7 at 16384x8192, 65.4 63.2 at 4194304x16, 10.0 9.5
// at 2000x4096.
struct FullAccess : VectorAccess {
  template <int N, typename T, typename Col>
  __device__ __forceinline__ static Pack<T, N> load(const T* row, Col col, Col) {
    Pack<T, N> pack;
    static_assert(sizeof(pack) == kVectorBytes);
    load_kept(row + col, pack.words);
    return pack;
  }
  template <typename T, int N, typename Col>
  __device__ __forceinline__ static void store(T* row, Col col, Col, const Pack<T, N>& pack) {
    *reinterpret_cast<Pack<T, N>*>(row + col) = pack;
  }
};
template <typename Access>
constexpr bool kIsFull = std::is_same_v<Access, FullAccess>;

// VectorAccess, and the L2 cache fetches whole lines.
struct LineAccess : VectorAccess {
  template <int N, typename T, typename Col>
  __device__ __forceinline__ static Pack<T, N> load(const T* row, Col col, Col width) {
    Pack<T, N> pack{};
    static_assert(sizeof(pack) == kVectorBytes);
    asm volatile(
        "{\n"
        "  .reg .pred wanted;\n"
        "  setp.ne.b32 wanted, %5, 0;\n"
        "  @wanted ld.global.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "+r"(pack.words[0]), "+r"(pack.words[1]), "+r"(pack.words[2]), "+r"(pack.words[3])
        : "l"(row + col), "r"(static_cast<int>(col < width))
        : "memory");
    return pack;
  }
};

// Rows of any length at any element-aligned address, at the speed of whole vectors. A pack lies
// across two aligned 16-byte blocks: both are read, of those that hold an element of the row, and
// shifted together; neighbouring lanes exchange their packs to write aligned blocks.
struct ShiftedAccess {
  static constexpr bool kWholePacks = false;
  static constexpr bool kSharesBlocks = true;  // among neighbouring lanes
  static constexpr bool kShifts = true;        // packs in registers, of which it takes many

  template <int N, typename T, typename Col>
  __device__ __forceinline__ static Pack<T, N> load(const T* row, Col col, Col width) {
    const auto begin = reinterpret_cast<std::uintptr_t>(row + col);
    const int shift = static_cast<int>(begin % kVectorBytes);
    const auto* const blocks = reinterpret_cast<const uint4*>(begin - shift);
    const int valid = static_cast<int>(min(width - col, static_cast<Col>(N)));
    const int end = shift + valid * static_cast<int>(sizeof(T));
    std::uint32_t words[8] = {};
    load_if(valid > 0, blocks, words);
    load_if(valid > 0 && end > kVectorBytes, blocks + 1, words + 4);
    return shifted<N, T>(words, shift);
  }
  template <int N, typename T>
  __device__ __forceinline__ static Pack<T, N> load_staged(std::uint32_t blocks, int shift) {
    std::uint32_t words[8];
    load_shared(blocks, words);
    load_shared(blocks + kVectorBytes, words + 4);
    return shifted<N, T>(words, shift);
  }

  // All 32 lanes call. A lane writes the aligned blocks in which its packs begin; the first
  // elements of such a block are the last ones of the pack before it. The first and the last block
  // of these packs together have others' elements too, and are written in part.
  template <int kLanes, typename T, int N, int kVectors, typename Col>
  __device__ __forceinline__ static void store_row(T* row, Col col, Col width,
                                                   const Pack<T, N> (&packs)[kVectors]) {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const auto begin = reinterpret_cast<std::uintptr_t>(row + col);
    const int shift = static_cast<int>(begin % kVectorBytes);
    std::uintptr_t place = begin - shift;
    std::uint32_t words[8] = {};  // in lane 0, the first four: the last lane's pack before this one
    int end = 0;                  // where the row ends, from the block's beginning
    Pack<T, N> first;
    int first_end = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      std::uint32_t before[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        before[k] =
            __shfl_sync(0xffffffffu, packs[i].words[k], (lane + kLanes - 1) % kLanes, kLanes);
        words[k] = lane == 0 ? words[k] : before[k];
        words[4 + k] = packs[i].words[k];
      }
      const Pack<T, N> block = shifted_back<N, T>(words, shift);
      const Col left = width - (col + i * kLanes * N);
      end = shift + static_cast<int>(max(min(left, Col{N}), -Col{N})) * int{sizeof(T)};
      if (i == 0) {
        first = block;
        first_end = end;
      }
      if (i == 0 && lane == 0 && shift != 0) {
        // below
      } else if (end >= kVectorBytes) {
        store_block(place, block.words);
      } else {
        store_part(place, block, 0, end);
      }
      place += kLanes * kVectorBytes;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        words[k] = before[k];
      }
    }
    if (shift != 0) {
      const Pack<T, N>& pack = packs[kVectors - 1];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        words[k] = pack.words[k];
        words[4 + k] = 0;
      }
      const Pack<T, N> last = shifted_back<N, T>(words, shift);
      const int last_end = end - kVectorBytes;
      place -= (kLanes - 1) * kVectorBytes;
      if constexpr (kLanes == 1) {
        store_part(begin - shift, first, shift, first_end);
        store_part(place, last, 0, last_end);
      } else if (lane == 0 || lane == kLanes - 1) {
        Pack<T, N> edge;  // one of them: both take the same instructions
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          edge.words[k] = lane == 0 ? first.words[k] : last.words[k];
        }
        store_part(lane == 0 ? begin - shift : place, edge, lane == 0 ? shift : 0,
                   lane == 0 ? first_end : last_end);
      }
    }
  }

  // From element `valid` on: `past` in the first of the packs, zeros in the others. (Backward has
  // the mean of a row past its end. x̂ of a zero there might be infinite, and dy·x̂ NaN.)
  template <typename Col, typename A, typename T, int N, typename... Packs>
  __device__ __forceinline__ static void clip_to(A past, Col valid, Pack<T, N>& pack,
                                                 Packs&... packs) {
    if (valid < N) {
      const Pack<T, N> filler = filled<T, N>(past);
      const int kept = static_cast<int>(max(valid, Col{0})) * 8 * static_cast<int>(sizeof(T));
#pragma unroll
      for (int k = 0; k < static_cast<int>(sizeof(pack) / 4); ++k) {
        const int dropped = 32 * (k + 1) - kept;  // bits
        const std::uint32_t mask = __funnelshift_rc(~0u, 0u, max(dropped, 0));
        pack.words[k] = (pack.words[k] & mask) | (filler.words[k] & ~mask);
        ((packs.words[k] &= mask), ...);
      }
    }
  }
  template <typename Col, typename T, int N>
  __device__ __forceinline__ static void clip(Col valid, Pack<T, N>& pack) {
    clip_to(Accumulator<T>(0), valid, pack);
  }

 private:
  __device__ __forceinline__ static void store_block(std::uintptr_t place,
                                                     const std::uint32_t (&words)[4]) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(place), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  }
  // Bytes first to end of a block.
  template <typename T, int N>
  __device__ __forceinline__ static void store_part(std::uintptr_t place, const Pack<T, N>& block,
                                                    int first, int end) {
    if (first < end) {
      T values[N];
      memcpy(values, block.words, sizeof(block.words));
      T* const target = static_cast<T*>(__cvta_global_to_generic(static_cast<std::size_t>(place)));
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const int at = j * int{sizeof(T)};
        if (at >= first && at < end) {
          target[j] = values[j];
        }
      }
    }
  }

  // The pack that begins `shift` bytes into two blocks.
  template <int N, typename T>
  __device__ __forceinline__ static Pack<T, N> shifted(std::uint32_t (&words)[8], int shift) {
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

// A pack of parameters that are there, and inside of the row.
template <int N, typename W, typename Col>
__device__ __forceinline__ Pack<W, N> load_present_parameters(const W* parameters, Col col) {
  return *reinterpret_cast<const Pack<W, N>*>(parameters + col);
}

// A pack of parameters, which begin at a multiple of 16 bytes. Absent ones (null) are `absent`
// everywhere; past the last column the pack holds anything.
template <int N, typename W, typename Col>
__device__ __forceinline__ Pack<W, N> load_parameters(const W* parameters, Col col, Col width,
                                                      float absent) {
  constexpr int kBlock = kVectorBytes / sizeof(W);
  W values[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    values[j] = static_cast<W>(absent);
  }
  Pack<W, N> pack = as_pack(values);
  if constexpr (N < kBlock) {
    load_if<sizeof(pack) / 4>(parameters != nullptr && col < width, parameters + col, pack.words);
  }
#pragma unroll
  for (int part = 0; part < N / kBlock; ++part) {
    load_if(parameters != nullptr && col + part * kBlock < width, parameters + col + part * kBlock,
            pack.words + 4 * part);
  }
  return pack;
}

}  // namespace fused_op::cuda
