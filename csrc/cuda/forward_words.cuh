// The forward of rows that are no whole number of vectors, and so begin anywhere, by words of 4
// bytes: neighbouring lanes have neighbouring words, which need no shifting. A row of 16-bit
// elements may begin in the middle of a word; its words are then put together from those of two
// lanes each. The element -> lane map is that of the row, never of its address.
//
// What bounded these rows was the number of instructions (Nsight Compute: schedulers 76 % busy, and
// three of five warps that could go on waiting for their turn): hence a row's parts are as long as
// each other, which leaves few words to compare with its end, and all others are loaded, summed and
// stored without a condition. H200, bf16, LayerNorm, by shifted vectors and so: 126 and 97 million
// instructions of a warp, 165 and 143 us at 131200x1023. (Two rows a thread, which share weight and
// bias, took as many registers as two threads, and 155 us.)
//
// Included by launch_*.cu only; torch-free.
#pragma once

#include "core/norm_args.h"
#include "core/row_source.h"
#include "cuda/dependent_launch.cuh"
#include "cuda/forward.cuh"
#include "cuda/row_access.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/row_tile.h"

namespace fused_op::cuda {

// Of a CTA with several rows. An even number of warps: see place_of_words.
template <typename Tile>
constexpr int kWordThreads = Tile::kWords == 8 ? 256 : 128;
constexpr int kWordBytes = 4;
template <typename T>
constexpr int kWordElements = kWordBytes / static_cast<int>(sizeof(T));

// A store stays between the loads before and after it, which spares registers. But of 16-bit rows
// that share warps, us so and with all stores last: 84.0 77.6 at 263172x255, bf16, H200. (Wide
// parameters leave no registers for that.)
template <typename W, typename T, typename Tile>
constexpr bool kStoresLast = sizeof(W) == 2 && sizeof(T) == 2 && Tile::kOneWarp;

// Registers a thread: 64, 40 for few words, 80 with all stores last, as many as it likes where rows
// are few.
template <typename W, typename T, typename Tile>
struct WordBounds {
  static constexpr int kThreads = Tile::kOneWarp ? kWordThreads<Tile> : kMaxRowThreads;
  static constexpr bool kLight = Tile::kOneWarp && Tile::kLanes == kWarpSize;
  static constexpr int kSmThreads = kLight ? 1536 : kStoresLast<W, T, Tile> ? 768 : 1024;
  static constexpr int kCtas = Tile::kEager ? 1 : kSmThreads / kThreads;
};

// Where a thread stands in a row whose parts have part_words words, the last longer_parts of them
// one more.
template <typename T, typename Tile>
__device__ __forceinline__ RowPlace place_of_words(const NormForwardArgs& args, int part_words,
                                                   int longer_parts) {
  constexpr int N = kWordElements<T>;
  constexpr int kLanes = Tile::kLanes;
  const int width = static_cast<int>(args.cols);
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  RowPlace place{.row = blockIdx.x,
                 .live_width = 0,
                 .lane = static_cast<int>(threadIdx.x) % kLanes,
                 .part = 0,
                 .parts = 1,
                 .first_col = 0,
                 .end = 0};
  bool is_live = true;
  if (Tile::kOneWarp || width <= kPartWords * N) {
    // Rows of a warp are an even number of rows apart: all begin at a word, or none does. Lanes
    // past the last row take the first of their warp along.
    const std::int64_t first = place.row * (blockDim.x / kLanes) + warp;
    place.row = first + static_cast<int>(threadIdx.x) % kWarpSize / kLanes * warps;
    is_live = place.row < args.rows;
    place.row = is_live ? place.row : first;
  } else {
    place.part = warp;
    place.parts = warps;
  }
  const int longer_before = max(place.part - (place.parts - longer_parts), 0);
  const bool longer = place.part >= place.parts - longer_parts;
  const int first_word = place.part * part_words + longer_before;
  place.first_col = (first_word + place.lane) * N;
  place.end = min(width, (first_word + part_words + (longer ? 1 : 0)) * N);
  place.live_width = is_live ? place.end : 0;
  return place;
}

// How take_untrusted reads and writes words.
struct AgainAccess : ByteAccess {
  static constexpr bool kWholePacks = false;
  static constexpr bool kSharesBlocks = false;
  static constexpr bool kShifts = false;
};
template <typename W, typename Norm, typename T, typename Tile, typename A>
__device__ __noinline__ void finish_untrusted_words(const NormForwardArgs& args, int part_words,
                                                    int longer_parts, Moments<A> moments,
                                                    WarpMoments<A>* parts) {
  const RowPlace place = place_of_words<T, Tile>(args, part_words, longer_parts);
  take_untrusted<W, Norm, WordRows<T>, AgainAccess, Tile>(args, place, moments,
                                                          CtaExchange<A>{parts});
}

// Moments of `count` elements in the words of kLanes neighbouring lanes, zero past the end, valid
// in every lane. `left` of the elements from the lane's first one on are before the end.
template <typename Norm, typename Tile, typename T, int N, typename A>
__device__ __forceinline__ Moments<A> moments_of_words(const Pack<T, N> (&words)[Tile::kWords],
                                                       int left, A count) {
  constexpr int kSure = Tile::kSure;
  // add(x, total, first) returns the total with x. Two totals in turn: shorter chains.
  const auto sum = [&](bool of_zeros_too, auto&& add) {
    A totals[2] = {};
#pragma unroll
    for (int i = 0; i < Tile::kWords; ++i) {
      A x[N];
      unpack(words[i], x);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const int at = i * N + j;
        A& total = totals[at % 2];
        const A next = add(x[j], total, at < 2);
        const bool counts = of_zeros_too || i < kSure || left > i * Tile::kLanes * N + j;
        total = counts ? next : total;
      }
    }
    return lane_sum<Tile::kLanes>(totals[0] + totals[1]);
  };
  const auto itself = [](A x, A total, bool first) { return first ? x : total + x; };
  const auto square = [](A x, A total, bool first) {
    return first ? x * x : multiply_add(x, x, total);
  };
  Moments<A> moments{};
  if constexpr (!Norm::kCentered) {
    moments.second = sum(true, square);
  } else {
    const A inverse_count = count > A(0) ? reciprocal(count) : A(0);
    moments.mean = sum(true, itself) * inverse_count;
    const auto about_mean = [&](auto&& add) {
      return sum(false,
                 [&](A x, A total, bool first) { return add(x - moments.mean, total, first); });
    };
    if constexpr (sizeof(T) >= 4) {  // means of 16-bit elements need no correction below rounding
      moments.rest = about_mean(itself) * inverse_count;
    }
    moments.second = about_mean(square) - count * moments.rest * moments.rest;
  }
  return moments;
}

// Whether something begins in the middle of a word.
template <typename T>
__device__ __forceinline__ bool splits_word(const T* place) {
  return sizeof(T) < kWordBytes && reinterpret_cast<std::uintptr_t>(place) % kWordBytes != 0;
}

// A lane's words, zero past the end: `left` elements from `row` on.
template <typename Tile, typename T, int N>
__device__ __forceinline__ void load_words(const T* row, int left,
                                           Pack<T, N> (&words)[Tile::kWords]) {
  constexpr int kLanes = Tile::kLanes;
  constexpr int kStep = kLanes * N;
  constexpr int kLast = Tile::kWords - 1;
  const int apart = splits_word(row) ? 1 : 0;
  const T* const from = row - apart;
#pragma unroll
  for (int i = 0; i <= kLast; ++i) {
    words[i] = {};
    const bool inside = i < Tile::kSure || left + apart > i * kStep;
    if constexpr (sizeof(T) == kWordBytes) {  // 16-bit rows gain nothing by it
      load_kept_if<1>(inside, from + i * kStep, words[i].words);
    } else {
      load_if<1>(inside, from + i * kStep, words[i].words);
    }
  }
  if constexpr (N == 2) {
    if (apart != 0) {
      const int lane = static_cast<int>(threadIdx.x) % kLanes;
      std::uint32_t beyond = 0;  // the word after the last lane's last
      load_if<1>(lane == kLanes - 1 && left > kLast * kStep + 1, from + kLast * kStep + N, &beyond);
#pragma unroll
      for (int i = 0; i <= kLast; ++i) {
        const std::uint32_t word = words[i].words[0];
        const std::uint32_t offered = lane > 0 ? word : i < kLast ? words[i + 1].words[0] : 0;
        std::uint32_t next = __shfl_sync(kAllLanes, offered, (lane + 1) % kLanes, kLanes);
        if (i == kLast && lane == kLanes - 1) {
          next = beyond;
        }
        words[i].words[0] = __byte_perm(word, next, 0x5432);
      }
    }
#pragma unroll
    for (int i = Tile::kSure; i <= kLast; ++i) {
      const int valid = left - i * kStep;
      words[i].words[0] &= valid >= N ? ~0u : valid > 0 ? 0xffffu : 0u;
    }
  }
}

template <typename T>
__device__ __forceinline__ void store_word(T* to, std::uint32_t word) {
  *reinterpret_cast<std::uint32_t*>(to) = word;
}
template <typename T>
__device__ __forceinline__ void store_half(T* to, std::uint32_t word) {
  *reinterpret_cast<std::uint16_t*>(to) = static_cast<std::uint16_t>(word);
}

// Writes the words of a row that begins in the middle of one: a lane writes the word in which its
// own begins, whose first half is the last one of the lane before it. The first and the last half
// of all these are written by themselves.
template <typename Tile, typename T, int N>
__device__ __forceinline__ void store_split(T* row, int left, bool is_live,
                                            const Pack<T, N> (&words)[Tile::kWords]) {
  constexpr int kLanes = Tile::kLanes;
  constexpr int kStep = kLanes * N;
  constexpr int kLast = Tile::kWords - 1;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  std::uint32_t carried = 0;  // in lane 0, the last lane's word before this one
#pragma unroll
  for (int i = 0; i <= kLast; ++i) {
    const bool sure = i < Tile::kSure;
    const std::uint32_t word = words[i].words[0];
    const std::uint32_t before = __shfl_sync(kAllLanes, word, (lane + kLanes - 1) % kLanes, kLanes);
    const std::uint32_t joined = __funnelshift_l(lane == 0 ? carried : before, word, 16);
    carried = before;
    const bool first = i == 0 && lane == 0;
    if (is_live && !first && (sure || left > i * kStep)) {
      store_word(row + i * kStep - 1, joined);
    } else if (is_live && !first && !sure && left == i * kStep) {
      store_half(row + i * kStep - 1, joined);
    } else if (is_live && first) {
      store_half(row, word);
    }
  }
  if (is_live && lane == kLanes - 1 && left > kLast * kStep + 1) {
    store_half(row + kLast * kStep + 1, words[kLast].words[0] >> 16);
  }
}

// Whether a kernel may be called without weight or bias: where rows are few, all are. Defaults are
// instructions: H200, us with them and without, LayerNorm, bf16: 142 135 at 1000000x65, 170 164 at
// 26214x5121, but 138 140 at 131200x1023, 139 142 at 32776x4095.
template <typename T, typename Tile>
constexpr bool kMayBeAbsent =
    Tile::kEager || (sizeof(T) == 2 && !Tile::kOneWarp && Tile::kWords == 16);

// Weight or bias from a lane's first column on; never read where absent.
template <typename W, typename T, typename Tile>
struct LaneParameters {
  const W* from;
  bool present;

  __device__ __forceinline__ LaneParameters(const void* parameters, int first_col)
      : from(static_cast<const W*>(parameters) + first_col), present(parameters != nullptr) {
    asm volatile("" : "+l"(from));  // or the address of each word is made anew
  }
  template <int N>
  __device__ __forceinline__ Pack<W, N> load(int offset, bool inside, float absent) const {
    Pack<W, N> pack{};
    if constexpr (kMayBeAbsent<T, Tile>) {
      pack = filled<W, N>(absent);
    }
    const bool wanted = inside && (!kMayBeAbsent<T, Tile> || present);
    load_if<sizeof(pack) / 4>(wanted, from + offset, pack.words);
    return pack;
  }
};

// grid: enough CTAs for all rows; block: the parts of a row, a warp each, or kWordThreads<Tile>.
template <typename W, typename Norm, typename T, typename Tile>
__global__ void __launch_bounds__(WordBounds<W, T, Tile>::kThreads, WordBounds<W, T, Tile>::kCtas)
    norm_forward_words_kernel(const __grid_constant__ NormForwardArgs args, int part_words,
                              int longer_parts) {
  using A = Accumulator<T>;
  constexpr int N = kWordElements<T>;
  constexpr int kLanes = Tile::kLanes;
  constexpr int kWords = Tile::kWords;
  constexpr int kSure = Tile::kSure;
  constexpr int kStep = kLanes * N;

  const auto [row, live_width, lane, part, parts_of_row, first_col, end] =
      place_of_words<T, Tile>(args, part_words, longer_parts);
  if (row >= args.rows) {
    return;  // in the whole warp
  }
  const bool is_live = live_width > 0;
  const int left = end - first_col;
  const int elements = left + lane * N;  // of the part
  const T* const input = row_of<T>(args.input, row) + first_col;
  constexpr int kLine = 128 / static_cast<int>(sizeof(T));
  if (blockIdx.x < kPrefetchingCtas && lane * kLine < elements + kLine) {
    prefetch(input - lane * N + min(lane * kLine, elements - 1));
  }
  await_kernels_before();

  Pack<T, N> words[kWords];
  load_words<Tile>(input, left, words);
  constexpr int kAhead = Tile::kEager || kWords <= 8 ? kWords : 4;  // of 16, eight: no faster
  using Parameters = LaneParameters<W, T, Tile>;
  Affine<W, Norm, N> affine[kAhead];
  const auto load_affine = [&](const Parameters& weight, const Parameters& bias, int i) {
    const bool inside = i < kSure || left > i * kStep;
    affine[i % kAhead].weight = weight.template load<N>(i * kStep, inside, 1);
    if constexpr (Norm::kCentered) {
      affine[i % kAhead].bias = bias.template load<N>(i * kStep, inside, 0);
    }
  };
  const auto load_first = [&](const Parameters& weight, const Parameters& bias) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      load_affine(weight, bias, i);
    }
  };
  if constexpr (Tile::kEager) {
    load_first({args.weight, first_col}, {args.bias, first_col});
  }
  const A cols = static_cast<A>(args.cols);
  const A inverse_cols = reciprocal(cols);
  const A count = static_cast<A>(elements);
  Moments<A> moments = moments_of_words<Norm, Tile>(words, left, count);
  __shared__ WarpMoments<A> parts[kMaxCtaParts];
  if (!Tile::kOneWarp && parts_of_row > 1) {
    const CtaExchange<A> exchange{parts};
    exchange.put(part, {count, moments});
    exchange.barrier();
    moments = merge_parts<Norm::kCentered, kMaxCtaParts>(parts, parts_of_row, inverse_cols);
  }
  // The same decision in every thread of a row; rows that share a warp go together.
  if (!__all_sync(kAllLanes, trusted(moments, cols))) {
    finish_untrusted_words<W, Norm, T, Tile>(args, part_words, longer_parts, moments, parts);
    return;
  }
  const bool saves = is_live && lane == 0 && part == 0;
  const Normalizer<A> normalizer =
      normalizer_of<Norm>(args, moments, A(1), inverse_cols, row, saves);
  const Parameters weight(args.weight, first_col);
  const Parameters bias(args.bias, first_col);
  if constexpr (!Tile::kEager) {
    load_first(weight, bias);
  }
  T* const output = static_cast<T*>(args.output.data) + row * args.cols + first_col;
  const auto store = [&](int i) {  // where no word is split
    if (is_live && (i < kSure || left >= i * kStep + N)) {
      store_word(output + i * kStep, words[i].words[0]);
    } else if (N == 2 && is_live && i >= kSure && left > i * kStep) {
      store_half(output + i * kStep, words[i].words[0]);
    }
  };
  const bool split = splits_word(output);
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    words[i] = output_of(affine[i % kAhead], words[i], normalizer);
    if (!kStoresLast<W, T, Tile> && !split) {
      store(i);
    }
    if (i + kAhead < kWords) {
      load_affine(weight, bias, i + kAhead);
    }
  }
  if (split) {
    if constexpr (N == 2) {
      store_split<Tile>(output, left, is_live, words);
    }
  } else if constexpr (kStoresLast<W, T, Tile>) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      store(i);
    }
  }
}

}  // namespace fused_op::cuda
