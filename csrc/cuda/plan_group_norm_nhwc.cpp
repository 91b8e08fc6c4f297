// Plans of group norms of images whose channels are neighbours: see group_norm_nhwc.h. Host code
// without CUDA or torch.
#include <algorithm>
#include <cstdint>

#include "core/pack.h"
#include "cuda/plan.h"
#include "cuda/plan_names.h"

namespace fused_op::cuda {
namespace {

constexpr std::int64_t kLeastBytes = 128;  // that a tile has of each pixel, if it has so many
constexpr int kLeastPack = 4;              // bytes; asynchronous copies have no fewer
constexpr std::int64_t kReads = 16;        // of a thread in each slab, in large images
constexpr std::int64_t kEnoughCtas = 64;   // for a sample; in small images slabs are smaller,
constexpr std::int64_t kLeastPixels = 16;  // but have so many pixels
constexpr std::int64_t kMostPixels = std::int64_t{1} << 30;

std::int64_t accumulator_bytes(DType dtype) { return dtype == DType::kFloat64 ? 8 : 4; }

// The groups of a tile: as few as have the least bytes of each pixel, in tiles of the same size and
// of whole packs. 0: there is no such tile that is small enough.
std::int64_t groups_of_tile(const GroupNormArgs& args, int pack) {
  const std::int64_t channels = args.group_channels();
  const std::int64_t most = kNhwcMostBytes / accumulator_bytes(args.dtype);
  const std::int64_t least = std::min(kLeastBytes / size_of(args.dtype), args.channels);
  for (std::int64_t groups = 1; groups <= args.groups && groups * channels <= most; ++groups) {
    if (args.groups % groups == 0 && groups * channels >= least && groups * channels % pack == 0) {
      return groups;
    }
  }
  return 0;
}

// Cuts the pixels of a sample into so many slabs, or a few less.
void cut(GroupNormNhwcSteps& steps, std::int64_t pixels, std::int64_t slabs) {
  const std::int64_t reads = ceil_div(ceil_div(pixels, slabs), steps.rows);  // of a thread
  steps.slab_pixels = static_cast<int>(std::min(reads * steps.rows, pixels));
  steps.slabs = static_cast<int>(ceil_div(pixels, steps.slab_pixels));
}

}  // namespace

std::optional<GroupNormNhwcPlan> plan_group_norm_nhwc(const GroupNormArgs& args) {
  GroupNormNhwcPlan plan{};
  plan.pack = kVectorBytes / size_of(args.dtype);
  while (args.channels % plan.pack != 0) {
    plan.pack /= 2;
  }
  const std::int64_t tile = groups_of_tile(args, plan.pack);
  const std::int64_t columns = tile * args.group_channels() / plan.pack;
  if (plan.pack * size_of(args.dtype) < kLeastPack || tile == 0 || columns > kNhwcThreads ||
      args.pixels > kMostPixels) {
    return std::nullopt;
  }
  GroupNormNhwcSteps& steps = plan.sums;
  steps.groups = static_cast<int>(args.groups);
  steps.group_channels = static_cast<int>(args.group_channels());
  steps.tile_groups = static_cast<int>(tile);
  steps.tiles = static_cast<int>(args.groups / tile);
  steps.columns = static_cast<int>(columns);
  steps.rows = static_cast<int>(std::min(kNhwcThreads / columns, args.pixels));
  plan.threads = static_cast<int>(ceil_div(columns * steps.rows, kWarpSize) * kWarpSize);
  const std::int64_t reads = ceil_div(args.pixels, steps.rows);
  const std::int64_t enough =
      std::min({ceil_div(kEnoughCtas, steps.tiles), ceil_div(reads, kNhwcStages),
                ceil_div(args.pixels, kLeastPixels), std::int64_t{kNhwcSlabs}});
  cut(steps, args.pixels, std::clamp<std::int64_t>(reads / kReads, enough, kNhwcSlabs));
  steps.sum_slabs = steps.slabs;
  return plan;
}

// So that the GPU has room for all CTAs at once, if there are few tiles and samples.
GroupNormNhwcSteps GroupNormNhwcPlan::write_steps(const GroupNormArgs& args, bool forward,
                                                  const DeviceInfo& device) const {
  GroupNormNhwcSteps steps = sums;
  const int ctas = forward ? kNhwcForwardCtas : kNhwcBackwardCtas;
  const std::int64_t slabs =
      std::int64_t{device.multiprocessors} * ctas / args.samples / steps.tiles;
  cut(steps, args.pixels, std::clamp<std::int64_t>(slabs, 1, ceil_div(args.pixels, steps.rows)));
  return steps;
}

std::int64_t GroupNormNhwcPlan::write_shared(DType dtype, bool forward) const {
  const int tensors = forward ? 1 : 2;
  return std::int64_t{kNhwcStages} * tensors * threads * pack * size_of(dtype);
}

std::int64_t GroupNormNhwcPlan::sums_shared(DType dtype, bool forward) const {
  const std::int64_t bytes = accumulator_bytes(dtype);
  const std::int64_t channels = std::int64_t{sums.columns} * pack;
  const std::int64_t kept =
      forward ? (bytes + 4) * sums.tile_groups : bytes * kNhwcSumsRows * channels;
  return 16 * nhwc_vectors(kept) +
         std::max(write_shared(dtype, forward), 2 * bytes * channels * sums.rows);
}

std::int64_t GroupNormNhwcPlan::workspace_bytes(const GroupNormForwardArgs& args) const {
  return accumulator_bytes(args.dtype) *
         (kNhwcForwardRows * args.samples * args.channels + 4 * args.all_groups() * sums.slabs);
}
std::int64_t GroupNormNhwcPlan::workspace_bytes(const GroupNormBackwardArgs& args) const {
  return accumulator_bytes(args.dtype) * args.samples * args.channels *
         (kNhwcBackwardRows + 2 * sums.slabs);
}

std::string nhwc_kernel_name(const std::string& what, DType dtype, int pack, bool silu) {
  return "fused_op::cuda::group_norm_nhwc_" + what + "_kernel<fused_op::cuda::NhwcOp" +
         joined({type(dtype), number(pack), flag(silu)}) + ">";
}
std::string nhwc_kernel_name(const std::string& what, DType dtype) {
  return "fused_op::cuda::group_norm_nhwc_" + what + "_kernel<" +
         std::string(dtype == DType::kFloat64 ? "double" : "float") + ">";
}

}  // namespace fused_op::cuda
