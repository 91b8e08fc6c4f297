// What the launch of a norm over channels and its kernels agree on. Host and device; torch-free.
#pragma once

#include <cstdint>

#include "core/channels_first.h"

namespace fused_op::cuda {

// A group of kWarps warps has a tile of kWarpSize · pack neighbouring pixels: a lane has `pack` of
// them, in every kWarps-th channel. Which warp has a channel, and with it the order of every sum
// over channels, depends on their number alone.
struct ChannelsFirstPlan {
  int pack;      // pixels of a lane
  int warps;     // of a group
  int groups;    // of a CTA
  int channels;  // a constant of the kernel, which then keeps what it reads; 0: read again
  std::int64_t tiles;
  std::int64_t ctas;
  std::int64_t partials_bytes = 0;  // backward: a row for each group; 0: no parameter has one

  std::int64_t all_groups() const { return ctas * groups; }
  int tile_pixels() const { return kWarpSize * pack; }
};

// Terms that a lane adds before it adds their sum to a total: sums over many channels stay exact.
constexpr int kFoldedChannels = 32;

}  // namespace fused_op::cuda
