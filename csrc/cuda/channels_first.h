// What the launch of a norm over channels and its kernels agree on. Host and device; torch-free.
#pragma once

#include <cstdint>

#include "core/channels_first.h"

namespace fused_op::cuda {

// A group of warps processes a tile of kWarpSize · pack neighbouring pixels. A lane has `pack` of
// them, in every channel that its warp has: every `warps`-th one. Which warp has a channel depends
// on the number of channels alone, and so does the order of every sum over channels.
struct ChannelsFirstPlan {
  int pack;      // pixels of a lane
  int warps;     // warps of a group
  int groups;    // groups of a CTA
  int channels;  // a constant of the kernel, which then keeps what it reads; 0: it reads again
  std::int64_t tiles;
  std::int64_t ctas;
  std::int64_t partials_bytes = 0;  // backward: one row for each group; 0: no gradient needs it

  std::int64_t all_groups() const { return ctas * groups; }
  int tile_pixels() const { return kWarpSize * pack; }
};

// How many terms a lane adds up before it adds their sum to a total. This keeps sums over many
// channels accurate.
constexpr int kFoldedChannels = 32;

}  // namespace fused_op::cuda
