// How a row is laid over threads, and which layout a row length gets. The layout depends on the row
// length and the element size alone: that is what makes a row's result independent of the number of
// rows, and it is why these functions do not see it. Host and device; torch-free.
//
// A tile gives kLanes lanes to a row, or, with 32 lanes, as many whole warps as the row needs. Each
// warp owns kVectors·32 neighbouring 16-byte vectors, each lane every 32nd of them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/pack.h"

namespace fused_op::cuda {

constexpr int kMaxRowThreads = 512;

template <int kLanes_, int kVectors_>
struct RowTile {
  static constexpr int kLanes = kLanes_;
  static constexpr int kVectors = kVectors_;
  static constexpr bool kOneWarp = kLanes < 32;       // several rows to a warp
  static constexpr int kSpread = 1;                   // warps that share what one would hold
  static constexpr bool kEager = false;               // loads parameters before it needs them
  static constexpr bool kTight = false;               // makes do with 56 registers
  static constexpr int kCtaThreads = kMaxRowThreads;  // backward
};

// Forward of few rows: RowTile<32, kSpread> with a warp for each of the vectors. They exchange
// every sum, and so give the same bits, sooner.
template <int kSpread_>
struct SpreadTile : RowTile<32, 1> {
  static constexpr int kSpread = kSpread_;
  static constexpr bool kEager = true;
};
constexpr int kMaxSpreadThreads = 512;

// RowTile<32, kVectors> with 56 registers a thread instead of 64, where more CTAs fit onto a
// multiprocessor that way: three instead of two of eleven or twelve warps.
template <int kVectors_>
struct TightTile : RowTile<32, kVectors_> {
  static constexpr bool kTight = true;
};
constexpr int kTightThreads = 576;  // two CTAs of them would have 56 registers each
// Warps of a multiprocessor with 56 registers a thread, and with 64.
constexpr int kTightSmWarps = 2 * kTightThreads / 32;
constexpr int kSmWarps = 1024 / 32;

// RowTile<32, 2> for up to eight warps, with 40 registers a thread.
struct LightTile : RowTile<32, 2> {};
constexpr int kLightThreads = 256;

// RowTile<32, 4> for the longest rows, of 13 to 16 warps, of which two are on a multiprocessor:
// weight and bias of one vector ahead, not two. H200, LayerNorm, bf16, us with two and with one:
// 131.2 129.7 at 8192x16384, 137.2 134.8 at 9362x14336, but 125.7 126.4 at 16384x8192.
struct LongTile : RowTile<32, 4> {};

// Forward of few rows: there are registers to spare, but latency counts.
template <typename Tile>
struct EagerTile : Tile {
  static constexpr bool kEager = true;
};

// Warps that share a row of `vectors` 16-byte vectors.
template <typename Tile>
FUSED_OP_HD constexpr int row_warps(std::int64_t vectors) {
  constexpr std::int64_t kWarpVectors = 32 * Tile::kVectors;
  return Tile::kOneWarp ? 1 : static_cast<int>((vectors + kWarpVectors - 1) / kWarpVectors);
}

// Forward: a CTA holds one row, or several rows of one warp at most. Registers are capped so that
// many CTAs are resident: loads of one overlap the arithmetic of the others. No cap may spill.
constexpr std::int64_t kMaxForwardVectors = kMaxRowThreads * 4;  // of a row in registers
constexpr int kMaxCtaParts = kMaxRowThreads / 32;                // warps
// The warps take longer rows in parts of kPartVectors, which lie in the shared memory of a
// cluster's CTAs (sm_90), or are read twice. Parts kMaxParts apart share a slot.
constexpr int kPartVectors = 32 * 4;
constexpr int kClusterWarps = 8;                  // of a CTA, at most
constexpr int kClusterParts = 2 * kClusterWarps;  // of a CTA, at most
constexpr int kMaxCluster = 16;                   // CTAs
constexpr int kMaxParts = kClusterParts * kMaxCluster;
// Threads that any multiprocessor of this architecture has room for: bounds that ask for more are
// an error of ptxas.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kMostSmThreads = 1024;
#else
constexpr int kMostSmThreads = 1536;
#endif
// Threads of a CTA with several rows, times the vectors of each. Large where a thread has little to
// do, since the start of a CTA takes its time: H200, bf16, us at 4194304x16 with 128 and with 256
// threads: LayerNorm 81 78, RMSNorm 81 66. Small where it has much, since its place is free only
// when its last row is done: with 128 and with 64, 128.2 127.4, 130.3 127.8 at 262144x512, 129.0
// 128.1, 129.8 127.8 at 131072x1024.
constexpr int kShortTileThreads = 256;
template <typename W, typename Source, typename Access, typename Tile>
struct ForwardBounds {
  static constexpr int kElement = sizeof(typename Source::Element);
  static constexpr bool kManyLoads = Source::kGradStreams == 3 || sizeof(W) > kElement;
  static constexpr bool kShifted = Access::kSharesBlocks;
  // Threads of a multiprocessor that share its 65536 registers.
  static constexpr int kThreadsPerSm = kElement == 8 || (kShifted && kManyLoads) ? 512
                                       : kShifted || kManyLoads                  ? 768
                                                                                 : 1024;
  static constexpr bool kHasLight = kElement < 8 && !kManyLoads;
  static constexpr bool kLight = std::is_same_v<Tile, LightTile>;
  static constexpr int kThreads = Tile::kEager      ? kMaxSpreadThreads
                                  : Tile::kTight    ? kTightThreads
                                  : kLight          ? kLightThreads
                                  : !Tile::kOneWarp ? kThreadsPerSm
                                                    : kShortTileThreads / Tile::kVectors;
  // More threads where each has few vectors in flight: 0.94 of the limit with 1024, 0.96 with 1280
  // at 1048576x64.
  static constexpr int kFewVectors = kThreadsPerSm < 1024 ? 0 : Tile::kVectors;
  static constexpr int kSmThreads = kFewVectors == 1   ? 1536
                                    : kFewVectors == 2 ? 1280
                                                       : kThreadsPerSm;
  static constexpr int kMostCtas = kMostSmThreads / kThreads;
  static constexpr int kCtas = Tile::kOneWarp ? kSmThreads / kThreads
                               : kLight       ? kMostSmThreads / kThreads
                               : Tile::kTight ? 2
                                              : 1;
  static constexpr int kCtasPerSm = kCtas < kMostCtas ? kCtas : kMostCtas;
};

// Four vectors a lane, so that a row's own work (sums over lanes, its root, its addresses) is
// spread over many; two or one where four would leave a row to one lane or two, whose loads then
// lie apart. H200, bf16, share of the limit: 0.76 with <1, 4>, 0.93 with <2, 2> at 2097152x32; 0.90
// with <2, 4>, 0.93 with <4, 2> at 1048576x64; 0.95 with <16, 4>, 0.91 with <32, 2> at 262144x512.
template <typename Function>
auto with_short_forward_tile(std::int64_t vectors, Function&& function) {  // up to kMaxSplitBytes
  if (vectors <= 1) return function.template operator()<RowTile<1, 1>>();
  if (vectors <= 2) return function.template operator()<RowTile<2, 1>>();
  if (vectors <= 4) return function.template operator()<RowTile<2, 2>>();
  if (vectors <= 8) return function.template operator()<RowTile<4, 2>>();
  if (vectors <= 16) return function.template operator()<RowTile<4, 4>>();
  return function.template operator()<RowTile<8, 4>>();
}
template <typename Bounds, typename Norm, typename Function>
auto with_forward_tile(std::int64_t vectors, Function&& function) {
  if (vectors <= 32) return with_short_forward_tile(vectors, function);
  if (vectors <= 64) return function.template operator()<RowTile<16, 4>>();
  const int warps = row_warps<RowTile<32, 4>>(vectors);
  // Three vectors where they make do with as many warps.
  const bool three = row_warps<RowTile<32, 3>>(vectors) == warps;
  const bool fills = (warps & (warps - 1)) == 0 && !three;  // one, two, four, eight or 16 warps
  if constexpr (Bounds::kThreadsPerSm == 1024) {            // others keep more registers
    // H200, bf16, us with 64 registers and with 56, LayerNorm and RMSNorm: 134 130, 128 128 at
    // 174762x768; 138 135, 129 129 at 52428x2560; 134 129, 128 129 at 18724x7168; 138 130, 129 130
    // at 14563x9216; share of the limit: 0.85 0.97, 0.93 0.97 at 10922x12288. But where a row fills
    // two warps, or four: 129.2 129.5 at 65536x2048, 130.5 132.3 at 32768x4096.
    const bool more_ctas = kTightSmWarps / warps > kSmWarps / warps;
    if (more_ctas && (Norm::kCentered ? !fills : warps > 8)) {
      if constexpr (Norm::kCentered) {
        if (three) return function.template operator()<TightTile<3>>();
      }
      return function.template operator()<TightTile<4>>();
    }
  }
  // RMSNorm does with 40 registers for two vectors: more threads. H200, us with four and with two:
  // 130.7 128.4 at 32768x4096, 127.6 127.0 at 65536x2048, bf16, 260.7 256.7 at 65536x2048, fp32;
  // but 130.4 134.6 at 16384x8192. At any address, for the bits.
  if constexpr (!Norm::kCentered && Bounds::kHasLight) {
    if (fills && (warps == 2 || warps == 4)) {
      using Tile = std::conditional_t<Bounds::kShifted, RowTile<32, 2>, LightTile>;
      return function.template operator()<Tile>();
    }
  }
  if (three) return function.template operator()<RowTile<32, 3>>();
  return function.template operator()<RowTile<32, 4>>();
}

// Forward by words of 4 bytes: a lane has kWords of them, and has the first kSure for sure, so that
// the others alone are compared with the row's end. Longer rows are of several parts of a warp
// each, which differ in length by one word at most.
template <int kLanes_, int kWords_, int kSure_ = kWords_ - 4>
struct WordTile : RowTile<kLanes_, kWords_> {
  static constexpr int kWords = kWords_;
  static constexpr int kSure = kSure_;
};
// Of rows that a warp takes by itself, of 193 to 256 words. H200, fp32, us with <16, 16> and so:
// 143 126 at 263172x255.
template <int kWords_>
struct WarpWordTile : WordTile<32, kWords_, 6> {
  static constexpr bool kOneWarp = true;
};
constexpr std::int64_t kMinWords = 32;  // of a row, are too few
constexpr std::int64_t kPartWords = 32 * 16;
constexpr std::int64_t word_parts(std::int64_t words) {
  return (words + kPartWords - 1) / kPartWords;
}
template <typename T, typename Function>
constexpr auto with_word_tile(std::int64_t words, Function&& function) {
  if (words <= 64) return function.template operator()<WordTile<8, 8>>();
  if (words <= 96) return function.template operator()<WordTile<8, 12>>();
  if (words <= 128) return function.template operator()<WordTile<8, 16>>();
  if (words <= 192) return function.template operator()<WordTile<16, 12>>();
  if constexpr (sizeof(T) == 4) {
    if (words <= 224) return function.template operator()<WarpWordTile<7>>();
    if (words <= 256) return function.template operator()<WarpWordTile<8>>();
  } else {
    if (words <= 256) return function.template operator()<WordTile<16, 16>>();
  }
  if (words <= word_parts(words) * 32 * 12) return function.template operator()<WordTile<32, 12>>();
  return function.template operator()<WordTile<32, 16>>();
}
// Whether lanes have what they are sure of, and no word too many: of rows of an odd number of
// 16-bit elements, half of the last part's last word is missing.
template <typename T>
constexpr bool word_tiles_hold() {
  for (std::int64_t words = kMinWords + 1; words <= kMaxForwardVectors * 4; ++words) {
    const std::int64_t parts = word_parts(words);
    const std::int64_t least = words / parts;
    const std::int64_t last = least + (words % parts != 0 ? 1 : 0);
    const bool holds = with_word_tile<T>(words, [&]<typename Tile>() {
      constexpr int kSure = Tile::kLanes * Tile::kSure;
      return least >= kSure && last - 1 >= kSure && last <= Tile::kLanes * Tile::kWords;
    });
    if (!holds) return false;
  }
  return true;
}
static_assert(word_tiles_hold<float>() && word_tiles_hold<std::int16_t>());

// Forward and backward of the flexible kernels, by packs of their own length.
constexpr std::int64_t kMaxFlexibleVectors = kMaxRowThreads * 2;
template <typename Function>
auto with_flexible_tile(std::int64_t vectors, Function&& function) {
  if (vectors <= 1) return function.template operator()<RowTile<1, 1>>();
  if (vectors <= 4) return function.template operator()<RowTile<4, 1>>();
  if (vectors <= 8) return function.template operator()<RowTile<8, 1>>();
  if (vectors <= 16) return function.template operator()<RowTile<16, 1>>();
  if (vectors <= 32) return function.template operator()<RowTile<32, 1>>();
  return function.template operator()<RowTile<32, 2>>();
}

// Backward: a CTA holds several rows side by side, 512 threads at most: 128 registers a thread, of
// which the parameter gradients take up to 64.
constexpr std::int64_t kMaxBackwardVectors = kMaxRowThreads * 4;

// Two vectors a lane in more threads, of which each remakes what it has no registers to keep.
struct WideTile : RowTile<32, 2> {
  static constexpr int kCtaThreads = 640;
};
constexpr int kMaxBackwardWarps = WideTile::kCtaThreads / 32;

// How good `per_lane` vectors a lane are for rows of `vectors`: the share of a CTA's lanes that
// have work, less where only one row fits, since its barriers then stop the whole multiprocessor,
// and less where a thread has too much to keep the row in registers.
template <typename Tile>
constexpr std::int64_t backward_merit(std::int64_t vectors) {
  constexpr int kThreads = Tile::kCtaThreads;
  constexpr bool kKeeps = Tile::kVectors == 2 && kThreads == kMaxRowThreads;
  const std::int64_t rows = kThreads / 32 / row_warps<Tile>(vectors);
  return rows * vectors * (rows == 1 ? 9 : 10) * (kKeeps ? 4 : 3) *
         (12 * 10240 / kThreads / Tile::kVectors);  // divisible by all of them
}

// The tiles of rows up to kMaxSplitBytes.
template <typename Function>
auto with_short_backward_tile(std::int64_t vectors, Function&& function) {
  if (vectors <= 1) return function.template operator()<RowTile<1, 1>>();
  if (vectors <= 2) return function.template operator()<RowTile<2, 1>>();
  if (vectors <= 4) return function.template operator()<RowTile<4, 1>>();
  if (vectors <= 8) return function.template operator()<RowTile<8, 1>>();
  if (vectors <= 16) return function.template operator()<RowTile<16, 1>>();
  return function.template operator()<RowTile<32, 1>>();
}

template <typename Norm, typename Source, typename Function>
auto with_backward_tile(std::int64_t cols, Function&& function) {
  constexpr int kElements = Source::kElements;
  constexpr bool kAdds = Source::kGradStreams == 3 && !Source::kDrops;
  const bool whole = cols % kElements == 0;
  const std::int64_t vectors = (cols + kElements - 1) / kElements;
  constexpr bool kWide = !Source::kDrops;  // dropout has no registers for the WideTile
  if (vectors <= 32) return with_short_backward_tile(vectors, function);
  // H200, bf16, share of the limit with 2, 3, 4 vectors: 0.91 0.70 0.82 at 131072x1024, 0.62 0.80
  // 0.89 at 26214x5120, 0.80 0.75 0.84 at 16384x8192. Three or four make loops of 13 KiB and more
  // of instructions, whose place in memory alone makes a difference of a tenth: 0.83 to 0.91 at
  // 26214x5120, where the WideTile had 0.93 each time. Of equal merit, three are better than two,
  // which leave lanes idle then: 0.80 0.94 at 233016x576, 0.90 0.92 at 174762x768, 0.88 0.92 at
  // 43690x3072. Not so with the gradient of a sum, 0.97 0.92 at 43690x3072 (but with dropout
  // besides 0.81 0.83), nor for RMSNorm by words: 0.83 0.71 at 43690x3071, LayerNorm 0.68 0.71.
  const bool has_two = whole || !kAdds;  // by words (word_access.cuh) there are no registers for it
  const std::int64_t two = has_two ? backward_merit<RowTile<32, 2>>(vectors) : 0;
  const std::int64_t wide = kWide && has_two ? backward_merit<WideTile>(vectors) : 0;
  const std::int64_t three = backward_merit<RowTile<32, 3>>(vectors);
  const std::int64_t four = backward_merit<RowTile<32, 4>>(vectors);
  const bool two_at_tie = whole ? kAdds : !Norm::kCentered;
  if (two >= wide && two >= four && (two_at_tie ? two >= three : two > three)) {
    return function.template operator()<RowTile<32, 2>>();
  }
  if constexpr (kWide) {
    if (wide >= three && wide >= four) return function.template operator()<WideTile>();
  }
  if (three >= four) return function.template operator()<RowTile<32, 3>>();
  return function.template operator()<RowTile<32, 4>>();
}

}  // namespace fused_op::cuda
