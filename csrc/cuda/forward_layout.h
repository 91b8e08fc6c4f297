// Constants that the plans of forward and its kernels share, other than the arguments of tiles.
// Host and device; torch-free.
#pragma once

namespace fused_op::cuda {

constexpr int kMaxRowWarps = 16;   // warps of a row in forward_kernel
constexpr int kFlatThreads = 256;  // threads of a CTA of forward_flat_kernel

// How many moments of a long row's parts are exchanged: enough for 16 CTAs of 16 warps. Parts at
// this distance from each other share one.
constexpr int kMaxSlots = 256;

// For long rows in turn:
constexpr int kInTurnSlots = 4;       // rows whose moments are being exchanged
constexpr int kInTurnOwn = 18 << 10;  // bytes of shared memory for these moments and for barriers

}  // namespace fused_op::cuda
