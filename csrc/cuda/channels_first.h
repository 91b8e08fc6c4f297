// What the launch of a norm over channels and its kernels agree on. Host and device; torch-free.
#pragma once

#include <cstdint>

#include "core/channels_first.h"

namespace fused_op::cuda {

// The pixels of all samples, in order, are cut into tiles. A tile may thus end in another sample,
// and only the last one may lack pixels. Were each sample cut by itself, an image of 14x14 would
// need four tiles of 64 pixels for the work of three. A pack lies in one sample, because its size
// divides the number of pixels.

// The element of a pixel in channel 0. `row`: the number of the pixel.
FUSED_OP_HD std::int64_t first_element(std::int64_t row, std::int64_t channels,
                                       std::int64_t pixels) {
  return row + row / pixels * (channels - 1) * pixels;
}

// Forward. A group of warps processes a tile of kWarpSize · pack neighbouring pixels. A lane has
// `pack` of them, in every channel that its warp has: every `warps`-th one. Which warp has a
// channel depends on the number of channels alone, and so does the order of every sum over
// channels.
struct ChannelsFirstPlan {
  int pack;      // pixels of a lane
  int warps;     // warps of a group
  int groups;    // groups of a CTA
  int channels;  // a constant of the kernel, which then keeps what it reads; 0: it reads again
  int ctas_per_sm;
  std::int64_t ctas;
};

// The threads of an SM in forward, if it reads channels again.
constexpr int kThreadsReadingAgain = 1024;

// How many terms a lane adds up before it adds their sum to a total. This keeps sums over many
// channels accurate.
constexpr int kFoldedChannels = 32;

// Backward. A CTA processes tiles of neighbouring pixels, one after another. It copies a tile's
// channels to shared memory. There each thread has a vector of 16 bytes, its pixels, in the
// channels of one slice: in every `slices`-th one. The order of every sum over channels follows
// from the slices, and these from the number of channels alone.
struct ChannelsFirstBackwardPlan {
  int pack;    // pixels that one copy moves, as addresses allow
  int lanes;   // threads side by side in a tile
  int slices;  // of the channels
  int stages;  // tiles in shared memory; with two, one is copied while the other is in use
  // In shared memory are all channels of a tile at once, their parameters and sums; or as many
  // channels as there is room for, and nothing but them.
  bool whole;
  std::int64_t some;  // channels at once
  std::int64_t ctas;
  std::int64_t shared_bytes;
  std::int64_t partials_bytes = 0;  // one row for each CTA; 0: no gradient needs it

  int threads() const { return lanes * slices; }
};

// The part of a plan that kernels read at run time.
struct ChannelsFirstBackwardSteps {
  std::int64_t some;
  int stages;
};

// The threads of an SM in backward: 80 registers suffice for each, but not if elements of 16 bits
// take more instructions. H200, bf16, LayerNorm, share of add with 512, 768 and 1024: 0.64 0.72
// 0.60 at 96 channels, 0.52 0.56 0.46 at 384.
FUSED_OP_HD constexpr int backward_threads(int element_bytes, int pack, bool silu) {
  return element_bytes == 2 && (silu || pack < 8) ? 512 : 768;
}

// The sums of each pixel that a CTA adds up over its slices, and the values of a pixel that its
// threads share at once, at most.
constexpr int kPixelSums = 2;
constexpr int kPixelValues = 3;

// The channels that the slices could have: beside a whole tile, so many weights are in shared
// memory, and with silu as many biases.
FUSED_OP_HD constexpr std::int64_t channel_slots(std::int64_t channels, int slices) {
  return (channels + slices - 1) / slices * slices;
}

// How many values of a tile its threads exchange: those, and the sums of each warp.
FUSED_OP_HD constexpr int exchanged_values(int tile, int warps) {
  return tile * (kPixelValues + kPixelSums * warps);
}

}  // namespace fused_op::cuda
