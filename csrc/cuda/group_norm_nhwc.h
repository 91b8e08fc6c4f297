// What the launch of a group norm of images whose channels are neighbours (NHWC) and its kernels
// agree on. Host and device; torch-free.
#pragma once

#include <cstdint>

#include "core/group_norm.h"
#include "cuda/device_info.h"

namespace fused_op::cuda {

// Three kernels run one after another. CTAs of the first one read a slab of a sample's pixels each,
// in a tile of its channels (all those of some groups), and leave its sums. The second one adds up
// the slabs, and makes what is needed of each channel. The third one reads all pixels again, and
// writes. (In backward, group_norm_sums_kernel makes the gradients of the parameters from the same
// sums; without a gradient of the input, it follows the first one.) A thread has the same pack of
// channels in some of the pixels.
//
// The plan of the sums follows from the shape of a sample and the dtype alone, and so does their
// order. How the third kernel cuts up the pixels changes the speed, but no bit.
struct GroupNormNhwcPlan {
  int pack;     // channels
  int threads;  // of a CTA

  // What kernels read at run time.
  struct Steps {
    int groups;          // of a sample
    int group_channels;  // of a group
    int tiles;           // of a sample
    int tile_groups;     // of a tile
    int columns;         // packs of a pixel in a tile
    int rows;            // pixels that the threads of a CTA have side by side
    int slabs;           // of a sample
    int slab_pixels;     // of a slab; the last may have fewer
    int sum_slabs;       // those of the first kernel
  };
  Steps sums;  // of the first kernel

  // Those of the third kernel.
  Steps write_steps(const GroupNormArgs& args, bool forward, const DeviceInfo& device) const;
  // Bytes of a CTA of the first kernel, and of the third one.
  std::int64_t sums_shared(DType dtype, bool forward) const;
  std::int64_t write_shared(DType dtype, bool forward) const;
  std::int64_t workspace_bytes(const GroupNormForwardArgs& args) const;
  std::int64_t workspace_bytes(const GroupNormBackwardArgs& args) const;
};
using GroupNormNhwcSteps = GroupNormNhwcPlan::Steps;

constexpr int kNhwcThreads = 256;       // of a CTA that reads pixels, at most
constexpr int kNhwcStages = 4;          // pixels of a thread that are on their way from memory
constexpr int kNhwcForwardCtas = 4;     // of an SM
constexpr int kNhwcBackwardCtas = 2;    // likewise
constexpr int kNhwcGroupThreads = 128;  // of a CTA that adds up the slabs of a group
constexpr int kNhwcSlabs = 64;          // of a sample, at most
constexpr int kNhwcMostBytes = 4096;    // of a tile's channels, as accumulators

// How many vectors of 16 bytes so many bytes take.
constexpr std::int64_t nhwc_vectors(std::int64_t bytes) { return (bytes + 15) / 16; }

// Numbers for each channel that the second kernel leaves. Some are those of a group; but a thread
// reads the ones of its channels together.
enum NhwcRow {
  kNhwcScale,
  kNhwcMean,
  kNhwcFactor,  // in forward, times rstd
  kNhwcOffset,
  kNhwcForwardRows,
  kNhwcRstd = kNhwcForwardRows,
  kNhwcSumsRows,  // what the first kernel of backward needs
  kNhwcMeanWdy = kNhwcSumsRows,
  kNhwcAlongXhat,
  kNhwcBackwardRows
};

}  // namespace fused_op::cuda
