// The norms over the channels of images, [samples, channels, pixels]: their arguments and what they
// add to the formulas of core/norm_math.h, for both backends. Torch-free.
//
//   n = x̂·weight + bias,  y = n or silu(n);  backward: dn = dy or dy·silu'(n), and then the norm's
//
// A row is a pixel, and its columns, the channels, are `pixels` elements apart. All that is read or
// written is dense; statistics lie as those of rows do.
#pragma once

#include "core/gated.h"
#include "core/norm_args.h"
#include "core/norm_math.h"

namespace fused_op {

// rows: samples · pixels; cols: channels. kLayerNorm, or kBiasedRmsNorm. Of the rows to read, only
// data and dtype are used.
struct ChannelsFirstForwardArgs : NormForwardArgs {
  std::int64_t pixels = 0;  // of a channel of a sample
  bool silu = false;
};
struct ChannelsFirstBackwardArgs : NormBackwardArgs {
  std::int64_t pixels = 0;
  bool silu = false;
};

// Where the tile of that number lies: `size` neighbouring pixels of a sample, or the last few.
struct PixelTile {
  std::int64_t row;    // of the first pixel
  std::int64_t first;  // element of its first channel
  std::int64_t count;  // of pixels

  FUSED_OP_HD static std::int64_t tiles_of_sample(std::int64_t pixels, std::int64_t size) {
    return (pixels + size - 1) / size;
  }
  FUSED_OP_HD PixelTile(std::int64_t number, std::int64_t size, std::int64_t channels,
                        std::int64_t pixels)
      : PixelTile(number / tiles_of_sample(pixels, size), number % tiles_of_sample(pixels, size),
                  size, channels, pixels) {}
  // The tile of that number in a sample.
  FUSED_OP_HD PixelTile(std::int64_t sample, std::int64_t tile, std::int64_t size,
                        std::int64_t channels, std::int64_t pixels) {
    const std::int64_t pixel = tile * size;
    row = sample * pixels + pixel;
    first = sample * channels * pixels + pixel;
    count = pixels - pixel < size ? pixels - pixel : size;
  }
};

}  // namespace fused_op
