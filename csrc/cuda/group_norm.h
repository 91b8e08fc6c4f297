// What the launch of a group norm and its kernels agree on. Host and device; torch-free.
#pragma once

#include <cstdint>

#include "core/group_norm.h"

namespace fused_op::cuda {

// A cluster of CTAs processes a group. The group is cut into slots, and a warp processes one slot
// after another. A slot has some of the group's planes (of a channel, in a sample). `lanes`
// neighbouring lanes of the warp share a plane, in packs of neighbouring pixels. If several slots
// have the same planes, they take turns in each: a warp's packs, then those of the next slot, so
// that together they read memory in order.
//
// pack, lanes and slots follow from the shape of a group and its dtype alone, and so does the order
// of all sums. How many CTAs share the slots changes the speed, but no bit.
struct GroupNormPlan {
  int pack;
  int at_once;  // packs of a plane and tensor that a lane reads at once
  int warps;    // of a CTA
  std::int64_t shared_bytes;

  // What kernels read at run time.
  struct Steps {
    int groups;    // of a sample
    int channels;  // of a group
    int lanes;
    int slots;
    int slots_of_plane;  // that share its pixels, a power of two; if several, `lanes` are a warp
    int planes;          // of a slot; the last may have fewer
    int turns;           // in a plane, of `lanes` packs
    int last_turn;       // packs of the last one
    int mapped;          // channels of the group whose factor and offset are in shared memory
    int cluster;         // CTAs
    int slots_of_cta;    // likewise
    int kept;  // packs of a slot that a lane keeps in shared memory, of each tensor that it reads
  };
  Steps steps;
};
using GroupNormSteps = GroupNormPlan::Steps;

constexpr int kGroupForwardWarps = 16;  // of a CTA, at most
constexpr int kGroupBackwardWarps = 12;
constexpr int kGroupCtasPerSm = 2;      // with most warps
constexpr int kGroupSlots = 128;        // at most
constexpr int kGroupSumsThreads = 128;  // of a CTA that adds up sums of channels

}  // namespace fused_op::cuda
