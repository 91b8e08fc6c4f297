// The rules that plans of group norms keep. Run by plans.cpp.
#include <algorithm>
#include <bit>
#include <initializer_list>
#include <optional>

#include "plans.h"

namespace fused_op::cuda {
namespace {

constexpr std::int64_t kMostCtas = (std::int64_t{1} << 31) - 1;

bool is_power_of_two(int value) {
  return value > 0 && std::has_single_bit(static_cast<unsigned>(value));
}

// The first rule that the plan breaks, or null. `other` is of another call with such groups.
const char* broken_rule(const GroupNormPlan& plan, const GroupNormPlan& other,
                        const GroupNormArgs& args, int tensors, const DeviceInfo& device) {
  const int size = size_of(args.dtype), own = args.dtype == DType::kFloat64 ? 4 : 2;  // KiB
  if (!is_power_of_two(plan.pack) || plan.pack * size > kVectorBytes ||
      args.pixels % plan.pack != 0) {
    return "no pack";
  }
  if (!is_power_of_two(plan.steps.lanes) || plan.steps.lanes > kWarpSize) {
    return "no number of lanes";
  }
  const GroupNormSteps& steps = plan.steps;
  const std::int64_t rows = ceil_div(args.group_channels(), steps.planes);
  if (steps.planes < 1 || steps.slots != rows * steps.slots_of_plane ||
      steps.turns < steps.slots_of_plane || steps.last_turn < 1 || steps.last_turn > steps.lanes ||
      std::int64_t{steps.turns - 1} * steps.lanes + steps.last_turn != args.pixels / plan.pack) {
    return "an element without a slot, or a slot without an element";
  }
  if (steps.slots_of_plane > 1 && steps.lanes != kWarpSize) {
    return "slots that share a plane by parts of warps";
  }
  if (plan.at_once < 1 || (plan.at_once > 1 && steps.turns == steps.slots_of_plane)) {
    return "steps that no lane has";
  }
  if (steps.mapped < 0 || steps.mapped > steps.channels) {
    return "maps of no channel";
  }
  if (!is_power_of_two(steps.slots_of_plane)) {
    return "slots that no shift can number";
  }
  if (steps.slots > kGroupSlots) {
    return "too many slots";
  }
  if (steps.cluster < 1 || ceil_div(steps.slots, steps.slots_of_cta) != steps.cluster) {
    return "a CTA without a slot";
  }
  if (steps.cluster > 1 && steps.cluster > device.max_cluster) {
    return "a cluster too large";
  }
  const int most_warps = tensors == 1 ? kGroupForwardWarps : kGroupBackwardWarps;
  if (plan.warps < 1 || plan.warps > most_warps || plan.warps > steps.slots_of_cta) {
    return "a warp without a slot";
  }
  const std::int64_t maps = std::int64_t{steps.mapped} * (args.dtype == DType::kFloat64 ? 16 : 8);
  const std::int64_t kept = std::int64_t{steps.kept} * kWarpSize * tensors * steps.slots_of_cta *
                            (plan.pack * size < 4 ? 4 : plan.pack * size);
  const std::int64_t bytes = ceil_div(maps, 16) * 16 + kept;
  if (steps.kept < 0 || plan.shared_bytes < bytes ||
      plan.shared_bytes + (own << 10) > most_dynamic_shared(device)) {
    return "too much shared memory, or too little";
  }
  const std::int64_t share = ceil_div(args.all_groups(), device.multiprocessors);
  const std::int64_t taken = plan.shared_bytes + (own << 10) + 1024;  // and what the system takes
  if (steps.cluster == 1 && share <= 4 && (share + 1) * taken <= device.shared_bytes + 1024) {
    return "room for more CTAs than the share of a multiprocessor";
  }
  if (args.all_groups() * steps.cluster > kMostCtas) {
    return "too many CTAs";
  }
  if (plan.pack != other.pack || plan.steps.lanes != other.steps.lanes ||
      steps.planes != other.steps.planes || steps.slots_of_plane != other.steps.slots_of_plane) {
    return "the order of a sum depends on more than the shape of a group";
  }
  return nullptr;
}

// The same of images whose channels are neighbours.
const char* broken_cut(const GroupNormNhwcSteps& steps, const GroupNormArgs& args) {
  const std::int64_t before = std::int64_t{steps.slabs - 1} * steps.slab_pixels;
  if (steps.slabs < 1 || before >= args.pixels || before + steps.slab_pixels < args.pixels) {
    return "a slab without a pixel, or a pixel without a slab";
  }
  return args.samples * steps.slabs * steps.tiles > kMostCtas ? "too many CTAs" : nullptr;
}

const char* broken_rule(const GroupNormNhwcPlan& plan, const GroupNormNhwcPlan& other,
                        const GroupNormArgs& args, bool forward, const DeviceInfo& device) {
  const GroupNormNhwcSteps& steps = plan.sums;
  const int bytes = plan.pack * size_of(args.dtype);
  if (bytes < 4 || bytes > kVectorBytes || !is_power_of_two(plan.pack) ||
      args.channels % plan.pack != 0) {
    return "no pack";
  }
  const std::int64_t tile = std::int64_t{steps.tile_groups} * steps.group_channels;
  if (steps.group_channels != args.group_channels() || steps.groups != args.groups ||
      std::int64_t{steps.tile_groups} * steps.tiles != args.groups ||
      std::int64_t{steps.columns} * plan.pack != tile) {
    return "a channel without a tile, or a tile of parts of groups";
  }
  if (tile * (args.dtype == DType::kFloat64 ? 8 : 4) > kNhwcMostBytes) {
    return "a tile with too many channels";
  }
  if (steps.rows < 1 || steps.rows > args.pixels || plan.threads % kWarpSize != 0 ||
      plan.threads > kNhwcThreads || steps.columns * steps.rows > plan.threads ||
      steps.columns * steps.rows + kWarpSize <= plan.threads) {
    return "a pack without a thread, or a warp without a pack";
  }
  const GroupNormNhwcSteps write = plan.write_steps(args, forward, device);
  if (steps.slabs > kNhwcSlabs || steps.sum_slabs != steps.slabs ||
      write.sum_slabs != steps.slabs) {
    return "too many slabs";
  }
  for (const GroupNormNhwcSteps& each : {steps, write}) {
    if (const char* const rule = broken_cut(each, args)) {
      return rule;
    }
  }
  const std::int64_t own = (args.dtype == DType::kFloat64 ? 6 : 5) << 10;
  if (std::max(plan.sums_shared(args.dtype, forward), plan.write_shared(args.dtype, forward)) +
          own >
      most_dynamic_shared(device)) {
    return "too much shared memory";
  }
  if (plan.pack != other.pack || steps.columns != other.sums.columns ||
      steps.rows != other.sums.rows || steps.slab_pixels != other.sums.slab_pixels) {
    return "the order of a sum depends on more than the shape of a sample";
  }
  return nullptr;
}

void walk_nhwc(const GroupNormArgs& args, const DeviceInfo& device) {
  const std::optional<GroupNormNhwcPlan> plan = plan_group_norm_nhwc(args);
  if (!plan) {
    return;
  }
  GroupNormArgs other = args;
  other.samples = args.samples % 7 + 1;
  for (const bool forward : {true, false}) {
    ++counts.walked;
    const char* const rule =
        broken_rule(*plan, *plan_group_norm_nhwc(other), args, forward, device);
    if (rule != nullptr) {
      report(rule, "group norm of channels-last images", args.all_groups(), args.group_elements(),
             device);
    }
  }
}

void walk(const GroupNormArgs& args, const DeviceInfo& device) {
  GroupNormArgs other = args;
  other.samples = args.samples % 7 + 1;
  other.groups *= 3;
  other.channels *= 3;
  DeviceInfo small = device;
  small.multiprocessors = 5;
  small.shared_bytes = 64 << 10;
  for (const int tensors : {1, 2}) {
    ++counts.walked;
    const char* const rule =
        broken_rule(plan_group_norm(args, tensors, device),
                    plan_group_norm(other, 3 - tensors, small), args, tensors, device);
    if (rule != nullptr) {
      report(rule, "group norm", args.all_groups(), args.group_elements(), device);
    }
  }
}

DeviceInfo device_of(int multiprocessors, int shared_kib, int arch) {
  DeviceInfo device{};
  device.multiprocessors = multiprocessors;
  device.shared_bytes = shared_kib << 10;
  device.arch = arch;
  device.max_cluster = max_cluster_of(arch);
  return device;
}

}  // namespace

void walk_group_norm() {
  for (const DType dtype : kTypes) {
    for (std::int64_t channels = 1; channels <= 4096; channels += channels < 100 ? 1 : 61) {
      for (std::int64_t pixels = 1; pixels <= std::int64_t{1} << 26;
           pixels += pixels < 300 ? 1 : pixels + pixels / 3) {
        for (const std::int64_t groups : {1, 32, 70'000}) {
          GroupNormArgs args;
          args.dtype = dtype;
          args.samples = groups % 5 + 1;
          args.groups = groups;
          args.channels = groups * channels;
          args.pixels = pixels;
          walk(args, device_of(132, 227, 90));
          walk(args, device_of(46, 64, 75));
          walk_nhwc(args, device_of(132, 227, 90));
          walk_nhwc(args, device_of(46, 64, 75));
        }
      }
    }
  }
}

}  // namespace fused_op::cuda
