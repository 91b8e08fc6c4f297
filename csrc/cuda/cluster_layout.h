// How forward lays a long row over the CTAs of a cluster (sm_90): plain integers, made of the row's
// length, the number of rows and the device. No CTA may be without a part of the row: it would end
// at once, while the others still write their moments into its shared memory, which may be another
// CTA's by then. tests/test_cluster_layout.py walks through every layout there is. Called by
// launch_forward.cuh; host code without CUDA or torch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/device_info.h"
#include "cuda/row_tile.h"

namespace fused_op::cuda {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

constexpr int kPartBytes = kPartVectors * kVectorBytes;  // in shared memory

struct ClusterLayout {
  std::int64_t ctas;
  std::int64_t cta_parts;  // parts of the row in each CTA; the last one has those that are left
};

// As many CTAs as it takes, none of them without a part.
constexpr ClusterLayout layout_of(std::int64_t parts, std::int64_t cta_parts) {
  return {ceil_div(parts, cta_parts), cta_parts};
}

// As few CTAs as hold a row with most_parts each, or, where rows are few, as many as fill the GPU
// with four parts or more each.
constexpr ClusterLayout spread_layout(std::int64_t parts, std::int64_t rows,
                                      std::int64_t most_parts, const DeviceInfo& device) {
  const std::int64_t least = ceil_div(parts, most_parts);
  const std::int64_t most = std::max(least, std::min<std::int64_t>(device.max_cluster, parts / 4));
  const std::int64_t wanted = std::clamp(ceil_div(device.multiprocessors, rows), least, most);
  return layout_of(parts, ceil_div(parts, wanted));
}

// norm_forward_cluster_kernel: a cluster takes one row. ctas is 0 where no cluster can hold one.
constexpr ClusterLayout one_row_layout(std::int64_t parts, std::int64_t rows,
                                       const DeviceInfo& device) {
  if (parts > std::int64_t{device.max_cluster} * kClusterParts) {
    return {};
  }
  return spread_layout(parts, rows, kClusterParts, device);
}
constexpr std::int64_t one_row_warps(const ClusterLayout& layout) {
  return ceil_div(layout.cta_parts, ceil_div(layout.cta_parts, kClusterWarps));
}
constexpr std::size_t one_row_shared_bytes(std::int64_t parts, const ClusterLayout& layout,
                                           std::size_t slot_bytes) {
  return parts * slot_bytes + layout.cta_parts * kPartBytes;
}

// norm_forward_parts_kernel: a cluster takes one row, and a warp kWarpParts of its parts into
// registers.
constexpr int kPartsWarps = 8;    // of a CTA, at most
constexpr int kWarpParts = 2;     // of a row
constexpr int kPartsCluster = 8;  // CTAs, at most: 0.93 0.90 with sixteen at 512x262144
// ctas is 0 where no cluster can hold a row, or rows are few: those finish sooner with one CTA per
// multiprocessor. H200, bf16, us with norm_forward_pipelined_kernel and so: 10.7 11.9 at 256x32768,
// 38.6 35.7 at 1024x32768.
constexpr ClusterLayout in_registers_layout(std::int64_t parts, std::int64_t rows,
                                            const DeviceInfo& device) {
  const std::int64_t ctas = ceil_div(parts, kPartsWarps * kWarpParts);
  const bool few = rows * ctas <= std::int64_t{device.multiprocessors} * 4;
  if (few || ctas > std::min(kPartsCluster, device.max_cluster)) {
    return {};
  }
  return layout_of(parts, ceil_div(parts, ctas * kWarpParts) * kWarpParts);
}

// norm_forward_pipelined_kernel: a cluster takes rows in turn, a warp one part of each.
constexpr int kPipelinedParts = kMaxRowThreads / 32;  // of a CTA, at most
constexpr int kPipelinedSlots = 4;
constexpr int kMinStages = 3;  // rows in shared memory
constexpr std::size_t pipelined_shared_bytes(std::int64_t parts, std::int64_t cta_parts, int stages,
                                             std::size_t slot_bytes) {
  return kPipelinedSlots * parts * slot_bytes + stages * cta_parts * kPartBytes;
}
// ctas is 0 where no cluster can hold a row.
constexpr ClusterLayout in_turn_layout(std::int64_t parts, std::int64_t rows,
                                       std::size_t slot_bytes, const DeviceInfo& device) {
  const auto slots =
      static_cast<std::int64_t>(pipelined_shared_bytes(parts, 0, kMinStages, slot_bytes));
  const std::int64_t room = (most_dynamic_shared(device) - slots) / (kMinStages * kPartBytes);
  const std::int64_t most_parts = std::min(std::int64_t{kPipelinedParts}, room);
  if (most_parts < 1 || parts > most_parts * device.max_cluster) {
    return {};
  }
  const ClusterLayout layout = spread_layout(parts, rows, most_parts, device);
  // Halve the CTAs if that lets more than twice as many run side by side: three of five warps
  // instead of one of ten. H200, bf16, share of the limit at 6553x20480, LayerNorm and RMSNorm:
  // 0.65 0.84, and so 0.85 0.87.
  const std::int64_t half_parts = ceil_div(parts, 2 * layout.ctas);
  if (2 * layout.ctas <= device.max_cluster &&
      kPipelinedParts / half_parts > 2 * (kPipelinedParts / layout.cta_parts)) {
    return layout_of(parts, half_parts);
  }
  // The GPU runs as many clusters of sixteen CTAs as of nine, or hardly fewer: H200, bf16,
  // LayerNorm, us, 222 194 with ten CTAs and with sixteen at 819x163840, 191 168 with twelve at
  // 682x196608. Few rows do not lose by it: 2.29 2.28 with twelve at 8x49152, 3.03 2.77 with eleven
  // at 12x65536.
  if (layout.ctas > 8) {
    return layout_of(parts, ceil_div(parts, std::int64_t{device.max_cluster}));
  }
  return layout;
}

}  // namespace fused_op::cuda
