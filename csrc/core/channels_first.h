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

}  // namespace fused_op
