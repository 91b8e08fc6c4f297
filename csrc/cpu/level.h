// The loops are compiled once for each instruction set level of CPUs: level_*.cpp. A level opens a
// namespace of its own and turns its instructions on after all standard headers, which are included
// here: the linker may share an inline function of theirs with other files, so it must run on every
// CPU. All levels give the same bits, because products and sums are never fused (setup.py).
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>

#include "core/channels_first.h"
#include "core/gated.h"
#include "core/modulated.h"
#include "core/norm_args.h"
#include "core/norm_math.h"
#include "core/quantize.h"
#include "core/rope.h"
#include "core/variant.h"
#include "cpu/group_chunks.h"

#ifndef FUSED_OP_CPU_X86  // 0: the default level alone, as on other CPUs
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define FUSED_OP_CPU_X86 1
#else
#define FUSED_OP_CPU_X86 0
#endif
#endif

#if FUSED_OP_CPU_X86
#include <immintrin.h>
#endif

#ifdef __clang__  // it reports each `#pragma omp simd` from which a level gains nothing
#pragma clang diagnostic ignored "-Wpass-failed"
#endif

// For code that runs for every few columns: a call would spill the lanes.
#define FUSED_OP_CPU_INLINE inline __attribute__((always_inline))
// For loops with many callers. Their copies were a tenth of a level's compile time (50 s with GCC
// 12, AVX2; 45 without).
#define FUSED_OP_CPU_SHARED __attribute__((noinline))

namespace fused_op::cpu {

constexpr std::int64_t kMaxLanes = 32;
// Columns in a part of a long row. 16 x 65536 bf16: 441 ps an element; with 8192 columns, 590
// (EPYC).
constexpr std::int64_t kTileCols = 1024;
// Elements in a tile of short rows. 4096 x 255 bf16: 99 ns a row; with 2048, 132; 512, 112 (EPYC).
constexpr std::int64_t kTileElements = 1024;
constexpr std::int64_t kTileRows = 256;
// Of fp64 tensors too large for the L2 cache. Between the reads of a tile and those of the next
// nothing comes from memory. Forward and backward of 10485 x 100: 2.9 ms with tiles of 1024
// elements, 2.1 with 256; but 0.18 and 0.19 of 1000 x 100. fp32 gains nothing (EPYC, one thread).
constexpr std::int64_t kStreamedDoubles = 256;
constexpr std::int64_t kCachedDoubles = 1 << 18;  // 2 MiB
constexpr std::int64_t kNarrowCols = 3;           // rows of so few are computed each in a lane
// Longer rows are processed in parts, so many of them together that they stay in the L2 cache. The
// fp32 weights of 4096 columns would fill L1 alone. Forward and backward of 256 x 4096 fp32: 1020
// us as whole rows, 945 in parts; forward of 128 x 8192 bf16: 366 us with one row at a time, 282
// with four (EPYC). For 16-bit rows, parameters are converted a part at a time, so they get twice
// the bytes: forward of 16 x 65536 bf16 600 us with one row, 515 with two; but fp32 760 with two,
// 690 with one (Xeon).
constexpr std::int64_t kWholeCols = 2048;
constexpr std::int64_t kLongBytes = 128 << 10;
constexpr std::int64_t kLongRows = 4;
constexpr std::int64_t kTileSize = 4 * kWholeCols;
static_assert(kLongRows * (kTileCols + kMaxLanes) <= kTileSize);
constexpr int kTiles = 4;  // in use at a time

std::int64_t norm_backward_chunks(const NormBackwardArgs& args);  // fused_op_cpu.h

// Pixels of a tile of cpu/channels_first.h: those of 16 bits are two lines of the cache. Images of
// a few pixels have tiles of their own.
constexpr int kTilePixels = 64;
constexpr int kFewPixels = 16;
constexpr std::int64_t tile_pixels(std::int64_t pixels) {
  return pixels > kFewPixels ? kTilePixels : kFewPixels;
}

// Where the tile of that number lies: `size` neighbouring pixels of a sample, or the last few.
struct PixelTile {
  std::int64_t row;    // of the first pixel
  std::int64_t first;  // element of its first channel
  std::int64_t count;  // of pixels

  static std::int64_t tiles_of_sample(std::int64_t pixels, std::int64_t size) {
    return (pixels + size - 1) / size;
  }
  PixelTile(std::int64_t number, std::int64_t size, std::int64_t channels, std::int64_t pixels) {
    const std::int64_t sample = number / tiles_of_sample(pixels, size);
    const std::int64_t pixel = number % tiles_of_sample(pixels, size) * size;
    row = sample * pixels + pixel;
    first = sample * channels * pixels + pixel;
    count = pixels - pixel < size ? pixels - pixel : size;
  }
};

// The sums over the rows that share an entry: the two of core/modulated.h, and the gate's.
constexpr int kEntrySums = 3;

// What the sum of squares is divided by. This is the only difference between the L2 norm and the
// RMS norm, whose loops compute both.
inline std::int64_t divisor(NormKind kind, std::int64_t cols) {
  return kind == NormKind::kL2Norm ? 1 : cols;
}

// kTiles uninitialised tiles of double. The thread keeps them: freed memory of that size goes back
// to the system, and its pages would be mapped again in every call.
void* thread_tiles();

struct Level {
  const char* name;
  void (*forward)(const NormForwardArgs& args, std::int64_t first_row, std::int64_t last_row);
  // sum = input + residual, without a norm.
  void (*add)(const NormForwardArgs& args, std::int64_t first_row, std::int64_t last_row);
  // Rows of an output to 8 bits. The first one is row `first_row` of the call.
  void (*quantize)(const Quantization& quantization, const void* output, DType dtype,
                   std::int64_t cols, std::int64_t first_row, std::int64_t last_row);
  void (*backward_rows)(const NormBackwardArgs& args, std::int64_t first_chunk,
                        std::int64_t last_chunk);
  void (*backward_columns)(const NormBackwardArgs& args, std::int64_t first_col,
                           std::int64_t last_col);
  // `args` is the base of the variant's own arguments. Chunks consist of rows of all groups.
  void (*variant_forward)(VariantId id, const NormForwardArgs& args, std::int64_t first_row,
                          std::int64_t last_row);
  void (*variant_backward_rows)(VariantId id, const NormBackwardArgs& args,
                                std::int64_t first_chunk, std::int64_t last_chunk,
                                std::int64_t chunks);
  void (*variant_backward_columns)(VariantId id, const NormBackwardArgs& args,
                                   std::int64_t first_col, std::int64_t last_col,
                                   std::int64_t chunks);
  void (*channels_first_forward)(const ChannelsFirstForwardArgs& args, std::int64_t first_tile,
                                 std::int64_t last_tile);
  void (*channels_first_backward)(const ChannelsFirstBackwardArgs& args, std::int64_t first_chunk,
                                  std::int64_t last_chunk, std::int64_t chunks);
  // A step of a range of chunks or of groups, and the gradients of a range of channels. `work` has
  // the doubles of cpu/group_chunks.h.
  void (*group_norm_forward)(const GroupNormForwardArgs& args, double* work, GroupStep step,
                             std::int64_t first, std::int64_t last);
  void (*group_norm_backward)(const GroupNormBackwardArgs& args, double* work, GroupStep step,
                              std::int64_t first, std::int64_t last);
  void (*group_norm_channels)(const GroupNormBackwardArgs& args, double* work,
                              std::int64_t first_channel, std::int64_t last_channel);
  // Adds the partial sums of so many chunks up to the parameters' gradients.
  void (*add_chunks)(const NormBackwardArgs& args, std::int64_t chunks, std::int64_t first_col,
                     std::int64_t last_col);
};

extern const Level kDefaultLevel;
#if FUSED_OP_CPU_X86
extern const Level kAvx2Level;
extern const Level kAvx512Level;
#endif

}  // namespace fused_op::cpu
