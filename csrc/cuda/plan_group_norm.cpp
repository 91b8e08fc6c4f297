// Plans of group norms: see group_norm.h. Host code without CUDA or torch.
#include <algorithm>
#include <cstdint>

#include "core/pack.h"
#include "cuda/plan.h"
#include "cuda/plan_names.h"

namespace fused_op::cuda {
namespace {

constexpr int kMostCluster = 8;   // what every GPU with clusters has
constexpr int kLoadsOfSlot = 8;   // of a warp, at least, but in small groups
constexpr int kPacksOfPlane = 4;  // of a lane, at least, where slots share planes
constexpr std::int64_t kMostMapped = 1024;
constexpr std::int64_t kKeptBytes = 104 << 10;     // of a CTA with kGroupWarps warps
constexpr std::int64_t kOwnSharedBytes = 5 << 10;  // of a CTA, beside what plans ask for

// The steps of a warp over a slot, if `lanes` lanes share a plane of so many packs.
std::int64_t steps_of(const GroupNormSteps& steps, std::int64_t packs, int lanes) {
  return ceil_div(steps.planes, kWarpSize / lanes) *
         ceil_div(ceil_div(packs, lanes), steps.slots_of_plane);
}

// What follows from the shape of a group and its dtype alone.
GroupNormPlan shape_of(const GroupNormArgs& args) {
  GroupNormPlan plan{};
  plan.pack = kVectorBytes / size_of(args.dtype);
  while (args.pixels % plan.pack != 0) {
    plan.pack /= 2;
  }
  GroupNormSteps& steps = plan.steps;
  steps.groups = static_cast<int>(args.groups);
  steps.channels = static_cast<int>(args.group_channels());
  const std::int64_t packs = args.pixels / plan.pack;
  const std::int64_t planes = args.group_channels();
  const std::int64_t loads = packs * planes / kWarpSize;  // of warps
  const std::int64_t slots = std::clamp<std::int64_t>(
      loads / kLoadsOfSlot, std::clamp<std::int64_t>(loads / 2, 1, 4), kGroupSlots);
  // Slots share planes first, as far as their lanes have some packs of each.
  steps.slots_of_plane =
      static_cast<int>(std::clamp<std::int64_t>(packs / (kWarpSize * kPacksOfPlane), 1, slots));
  steps.planes = static_cast<int>(ceil_div(planes, slots / steps.slots_of_plane));
  steps.slots = static_cast<int>(ceil_div(planes, steps.planes)) * steps.slots_of_plane;
  steps.lanes = kWarpSize;
  for (int lanes = kWarpSize / 2; lanes > 0 && steps.slots_of_plane == 1; lanes /= 2) {
    if (steps_of(steps, packs, lanes) < steps_of(steps, packs, steps.lanes)) {
      steps.lanes = lanes;
    }
  }
  steps.turns = static_cast<int>(ceil_div(packs, steps.lanes));
  steps.last_turn = static_cast<int>(packs - std::int64_t{steps.turns - 1} * steps.lanes);
  return plan;
}

}  // namespace

GroupNormPlan plan_group_norm(const GroupNormArgs& args, int tensors, const DeviceInfo& device,
                              int most_cluster) {
  GroupNormPlan plan = shape_of(args);
  GroupNormSteps& steps = plan.steps;
  const std::int64_t packs =  // of a lane in a slot
      steps_of(steps, args.pixels / plan.pack, steps.lanes);
  const std::int64_t of_plane = ceil_div(steps.turns, steps.slots_of_plane);
  const int most_at_once = args.dtype == DType::kFloat64 ? 2 : 8;
  plan.at_once = of_plane == 1 ? 1 : std::min(of_plane <= 4 ? 4 : 8, most_at_once);
  const std::int64_t bytes = std::max(plan.pack * size_of(args.dtype), 4) * kWarpSize * tensors;
  steps.mapped = static_cast<int>(std::min(args.group_channels(), kMostMapped));
  const std::int64_t maps = (steps.mapped + 1) / 2 * (args.dtype == DType::kFloat64 ? 32 : 16);
  const std::int64_t most_room =
      most_dynamic_shared(device) / kGroupCtasPerSm - kOwnSharedBytes - maps;
  const auto share_out = [&](int cluster) {
    steps.slots_of_cta = static_cast<int>(ceil_div(steps.slots, cluster));
    steps.cluster = static_cast<int>(ceil_div(steps.slots, steps.slots_of_cta));
    const std::int64_t rounds = ceil_div(steps.slots_of_cta, kGroupWarps);
    plan.warps = static_cast<int>(ceil_div(steps.slots_of_cta, rounds));
    const std::int64_t room = std::min(kKeptBytes * plan.warps / kGroupWarps, most_room);
    steps.kept = static_cast<int>(
        std::min(packs, std::max<std::int64_t>(room, 0) / (steps.slots_of_cta * bytes)));
    plan.shared_bytes = maps + steps.kept * steps.slots_of_cta * bytes;
  };
  const int most = std::min({steps.slots, device.max_cluster, kMostCluster, most_cluster});
  int cluster = 1;
  share_out(cluster);
  while (cluster * 2 <= most && (steps.slots_of_cta > kGroupWarps ||
                                 args.all_groups() * cluster * 2 < 3 * device.multiprocessors)) {
    cluster *= 2;
    share_out(cluster);
  }
  return plan;
}

std::int64_t group_norm_sums_bytes(const GroupNormBackwardArgs& args) {
  const std::int64_t bytes = args.dtype == DType::kFloat64 ? 16 : 8;
  return args.wants_sums()
             ? args.samples * args.channels * shape_of(args).steps.slots_of_plane * bytes
             : 0;
}

std::string group_norm_kernel_name(const GroupNormArgs& args, const GroupNormPlan& plan,
                                   bool forward) {
  return "fused_op::cuda::group_norm_" + std::string(forward ? "forward" : "backward") +
         "_kernel<fused_op::cuda::GroupNormOp" +
         joined({type(args.dtype), number(plan.pack), number(plan.at_once), flag(args.silu)}) + ">";
}

std::string group_norm_sums_kernel_name(const GroupNormArgs& args) {
  return "fused_op::cuda::group_norm_sums_kernel<" +
         std::string(args.dtype == DType::kFloat64 ? "double" : "float") + ">";
}

}  // namespace fused_op::cuda
