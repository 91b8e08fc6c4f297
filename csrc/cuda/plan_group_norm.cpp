// Plans of group norms: see group_norm.h. Host code without CUDA or torch.
#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/pack.h"
#include "cuda/plan.h"
#include "cuda/plan_names.h"

namespace fused_op::cuda {
namespace {

constexpr int kMostCluster = 8;  // what every GPU with clusters has
constexpr int kLineBytes = 128;  // of memory
// Of a warp, at least, in large groups. H200, bf16, silu, share of copy with 8, 16 and 32: 0.61
// 0.71 0.62 at 8x256x128x128.
constexpr int kLoadsOfSlot = 16;
constexpr std::int64_t kSlotsOfSmallGroup = 12;
constexpr std::int64_t kMostMapped = 1024;
constexpr std::int64_t kOwnSharedBytes = 5 << 10;  // of a CTA, beside what plans ask for
constexpr std::int64_t kMostShare = 4;             // CTAs of a multiprocessor, if it is to be even

// How many packs a lane reads at once, where its part of a plane has so many.
int at_once_of(DType dtype) { return dtype == DType::kFloat64 ? 2 : 4; }

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
  const std::int64_t of_small = std::clamp<std::int64_t>(loads / 2, 1, kSlotsOfSmallGroup);
  const std::int64_t slots = std::clamp<std::int64_t>(loads / kLoadsOfSlot, of_small, kGroupSlots);
  // Slots share planes if there are more slots than planes.
  steps.slots_of_plane =
      std::bit_floor(static_cast<unsigned>(std::max<std::int64_t>(slots / planes, 1)));
  steps.planes = static_cast<int>(ceil_div(planes, slots / steps.slots_of_plane));
  steps.slots = static_cast<int>(ceil_div(planes, steps.planes)) * steps.slots_of_plane;
  // Fewer lanes for a plane take fewer steps if it is small. Where they take as many, several
  // planes side by side give each lane more packs to read at once; but whole lines of each.
  steps.lanes = kWarpSize;
  for (int lanes = kWarpSize / 2; lanes > 0 && steps.slots_of_plane == 1; lanes /= 2) {
    const std::int64_t more = steps_of(steps, packs, lanes) - steps_of(steps, packs, steps.lanes);
    const bool lines = lanes * plan.pack * size_of(args.dtype) >= kLineBytes;
    if (more < 0 || (more == 0 && lines && steps.planes >= kWarpSize / lanes)) {
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
  plan.at_once = steps.turns == steps.slots_of_plane ? 1 : at_once_of(args.dtype) / tensors;
  const std::int64_t bytes = std::max(plan.pack * size_of(args.dtype), 4) * kWarpSize * tensors;
  steps.mapped = static_cast<int>(std::min(args.group_channels(), kMostMapped));
  const std::int64_t maps = (steps.mapped + 1) / 2 * (args.dtype == DType::kFloat64 ? 32 : 16);
  const int most_warps = tensors == 1 ? kGroupForwardWarps : kGroupBackwardWarps;
  const std::int64_t of_cta = most_dynamic_shared(device) / kGroupCtasPerSm - kOwnSharedBytes;
  const std::int64_t room = std::max<std::int64_t>(of_cta - maps, 0);  // of a CTA of most_warps
  const auto share_out = [&](int cluster) {
    steps.slots_of_cta = static_cast<int>(ceil_div(steps.slots, cluster));
    steps.cluster = static_cast<int>(ceil_div(steps.slots, steps.slots_of_cta));
    const std::int64_t rounds = ceil_div(steps.slots_of_cta, most_warps);
    plan.warps = static_cast<int>(ceil_div(steps.slots_of_cta, rounds));
    steps.kept = static_cast<int>(
        std::min(packs, room * plan.warps / most_warps / (steps.slots_of_cta * bytes)));
    plan.shared_bytes = maps + steps.kept * steps.slots_of_cta * bytes;
  };
  const int most = std::min({steps.slots, device.max_cluster, kMostCluster, most_cluster});
  int cluster = 1;
  share_out(cluster);
  while (cluster * 2 <= most && (steps.slots_of_cta > most_warps ||
                                 args.all_groups() * cluster * 2 < 3 * device.multiprocessors)) {
    cluster *= 2;
    share_out(cluster);
  }
  // While the kernel before it runs, a GPU places CTAs wherever there is room, and some
  // multiprocessors would get more than their share. So there is no room for more. (Clusters stay
  // within a part of the GPU, which may need that room.) H200, bf16, share of copy without and with
  // this: 0.56 0.70 at 8x320x64x64.
  const std::int64_t share = ceil_div(args.all_groups(), device.multiprocessors);
  if (steps.cluster == 1 && share <= kMostShare) {
    plan.shared_bytes =
        std::max(plan.shared_bytes, most_dynamic_shared(device) / (share + 1) / 16 * 16);
  }
  return plan;
}

std::int64_t group_norm_workspace_bytes(const GroupNormForwardArgs& args) {
  return args.nhwc ? plan_group_norm_nhwc(args)->workspace_bytes(args) : 0;
}

std::int64_t group_norm_workspace_bytes(const GroupNormBackwardArgs& args) {
  if (args.nhwc) {
    return plan_group_norm_nhwc(args)->workspace_bytes(args);
  }
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
