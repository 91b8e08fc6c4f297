// The rules that plans of norms over the channels of images keep. Run by plans.cpp.
#include <bit>
#include <utility>
#include <vector>

#include "plans.h"

namespace fused_op::cuda {
namespace {

constexpr int kMostThreads = 512;
constexpr int kMostBarriers = 15;                // named barriers, one for each group
constexpr std::int64_t kMostShared = 48 * 1024;  // bytes that a kernel may use without asking
constexpr std::int64_t kMostCtas = (std::int64_t{1} << 31) - 1;

struct Call {
  DType dtype;
  std::int64_t samples, channels, pixels;
  std::uintptr_t offset;  // bytes from an aligned address; of one tensor, as others are aligned
};

// The first rule that the plan breaks, or null.
const char* broken_rule(const ChannelsFirstPlan& plan, const Call& call, int warps) {
  constexpr int kValues = 2;  // that a CTA exchanges for each pixel
  const std::int64_t size = size_of(call.dtype), bytes = plan.pack * size;
  const std::int64_t accumulator = call.dtype == DType::kFloat64 ? 8 : 4;
  const std::int64_t tile = kWarpSize * plan.pack;
  if (plan.pack < 1 || !std::has_single_bit(static_cast<unsigned>(plan.pack)) || bytes > 16) {
    return "no pack";
  }
  if (call.pixels % plan.pack != 0 || call.offset % static_cast<std::uintptr_t>(bytes) != 0) {
    return "a pack that rows or addresses do not have";
  }
  if (plan.warps != warps) {
    return "the order of a sum depends on more than the channels";
  }
  if (plan.channels != 0 && plan.channels != call.channels) {
    return "a kernel of other channels";
  }
  if (plan.groups < 1 || plan.groups > kMostBarriers ||
      plan.warps * plan.groups * kWarpSize > kMostThreads) {
    return "too many threads";
  }
  const int threads = plan.warps * plan.groups * kWarpSize;
  if (plan.ctas_per_sm < 1 || plan.ctas_per_sm * threads > 1024) {
    return "CTAs of an SM";
  }
  const std::int64_t parameters = 2 * (plan.channels + plan.warps) * accumulator;
  if (plan.groups * kValues * plan.warps * tile * accumulator + parameters > kMostShared) {
    return "too much shared memory";
  }
  const std::int64_t of_cta = plan.groups * tile, rows = call.samples * call.pixels;
  if (plan.ctas < 1 || plan.ctas > kMostCtas || (plan.ctas - 1) * of_cta >= rows) {
    return "a CTA without pixels";
  }
  if (plan.ctas * of_cta < rows) {
    return "pixels without a CTA";
  }
  return nullptr;
}

bool is_power_of_two(int value) {
  return value > 0 && std::has_single_bit(static_cast<unsigned>(value));
}

// The same for backward. `sums`: values that a CTA keeps for all of its tiles, if there is room.
const char* broken_rule(const ChannelsFirstBackwardPlan& plan, const Call& call, int slices,
                        std::int64_t sums, bool silu, const DeviceInfo& device) {
  const std::int64_t size = size_of(call.dtype), bytes = plan.pack * size;
  const std::int64_t accumulator = call.dtype == DType::kFloat64 ? 8 : 4;
  const std::int64_t row = plan.lanes * kVectorBytes, tile = row / size;
  if (!is_power_of_two(plan.pack) || bytes > kVectorBytes) {
    return "no pack";
  }
  if (call.pixels % plan.pack != 0 || call.offset % static_cast<std::uintptr_t>(bytes) != 0) {
    return "a pack that rows or addresses do not have";
  }
  if (plan.slices != slices) {
    return "the order of a sum depends on more than the channels";
  }
  if (!is_power_of_two(plan.lanes) || plan.lanes < 2 || plan.lanes > kWarpSize ||
      plan.threads() % kWarpSize != 0 || plan.threads() > kMostThreads) {
    return "no such number of threads";
  }
  if (plan.threads() * plan.pack < tile) {
    return "too few threads to copy a channel";
  }
  if (plan.some < 1 || plan.some > call.channels || (!plan.whole && plan.some % plan.slices != 0) ||
      plan.stages < 1 || plan.stages > (plan.whole ? 2 : 1)) {
    return "channels without a slice, or some of a tile ahead";
  }
  const bool in_words = plan.pack * size < kVectorBytes;
  if (in_words && plan.stages > 1 && plan.ctas > device.multiprocessors) {
    return "two tiles where copies need the L1 cache";
  }
  const std::int64_t exchange =
      exchanged_values(static_cast<int>(tile), plan.threads() / kWarpSize) * accumulator;
  const std::int64_t parameters = ceil_div(call.channels, slices) * slices * (silu ? 2 : 1);
  const std::int64_t kept = plan.whole ? sums * accumulator + parameters * size : 0;
  if (plan.shared_bytes < plan.stages * 2 * plan.some * row + exchange + kept ||
      plan.shared_bytes > most_dynamic_shared(device)) {
    return "shared memory";
  }
  if (plan.ctas < 1 || plan.ctas > kMostCtas ||
      (plan.ctas - 1) * tile >= call.samples * call.pixels) {
    return "a CTA without pixels";
  }
  return nullptr;
}

const char* broken_backward(const ChannelsFirstBackwardPlan& plan, const Call& call, int slices,
                            bool sums, bool silu, const DeviceInfo& device) {
  const std::int64_t accumulator = call.dtype == DType::kFloat64 ? 8 : 4;
  const std::int64_t row = sums ? 2 * ((call.channels + 7) / 8 * 8) : 0;
  if (plan.partials_bytes != plan.ctas * row * accumulator) {
    return "other partial sums than CTAs";
  }
  return broken_rule(plan, call, slices, row, silu, device);
}

template <typename Args>
Args args_of(const Call& call) {
  Args args;
  args.kind = NormKind::kLayerNorm;
  args.dtype = args.param_dtype = call.dtype;
  args.rows = call.samples * call.pixels;
  args.cols = call.channels;
  args.pixels = call.pixels;
  return args;
}

void walk(const Call& call, int warps, int slices, const DeviceInfo& device) {
  const auto address = [&](bool moved) {
    return reinterpret_cast<void*>(std::uintptr_t{1} << 20 | (moved ? call.offset : 0));
  };
  auto forward = args_of<ChannelsFirstForwardArgs>(call);
  const long long turn = counts.walked / 4;  // of the tensors to have the offset
  forward.input.data = address(turn % 2 == 0);
  forward.output.data = address(turn % 2 == 1);
  const auto check = [&](const char* rule, const char* name) {
    ++counts.walked;
    if (rule != nullptr) {
      report(rule, name, call.samples * call.pixels, call.channels, device);
    }
  };
  check(broken_rule(plan_channels_first(forward, device), call, warps), "channels first");
  for (const auto& [sums, silu] : {std::pair{false, false}, {true, false}, {true, true}}) {
    auto backward = args_of<ChannelsFirstBackwardArgs>(call);
    backward.x.data = address(counts.walked % 3 == 0);
    backward.grad_output.data = address(counts.walked % 3 == 1);
    backward.grad_input.data = address(counts.walked % 3 == 2);
    backward.silu = silu;
    backward.grad_weight = sums ? &backward : nullptr;  // only whether it is null counts
    check(broken_backward(plan_channels_first(backward, device), call, slices, sums, silu, device),
          silu   ? "channels first backward, silu"
          : sums ? "channels first backward, sums"
                 : "channels first backward");
  }
}

DeviceInfo device_of(int multiprocessors, int shared_kib) {
  DeviceInfo device{};
  device.multiprocessors = multiprocessors;
  device.shared_bytes = shared_kib << 10;
  return device;
}

std::vector<std::int64_t> channel_counts() {
  std::vector<std::int64_t> found;
  for (std::int64_t count = 1; count <= 70'000; count += count < 2048 ? 1 : 97) {
    found.push_back(count);
  }
  return found;
}

}  // namespace

void walk_channels_first() {
  for (const std::int64_t channels : channel_counts()) {
    // A call of another dtype, image and device: how channels are shared out must not depend on
    // them.
    const Call any{DType::kFloat32, 1, channels, 64, 0};
    const DeviceInfo other = device_of(7, 99);
    const int warps = plan_channels_first(args_of<ChannelsFirstForwardArgs>(any), other).warps;
    const int slices = plan_channels_first(args_of<ChannelsFirstBackwardArgs>(any), other).slices;
    for (const DType dtype : kTypes) {
      for (const std::int64_t pixels : {2, 3, 8, 49, 196, 1000, 3136, 65'536, 1 << 26}) {
        for (const std::int64_t samples : {1, 3, 257}) {
          for (const int offset : {0, size_of(dtype), 8}) {
            // Those of compute capability 7.5, 9.0 and 12.0.
            for (const auto& [multiprocessors, shared_kib] :
                 {std::pair{1, 64}, {132, 227}, {192, 99}}) {
              walk({dtype, samples, channels, pixels, static_cast<std::uintptr_t>(offset)}, warps,
                   slices, device_of(multiprocessors, shared_kib));
            }
          }
        }
      }
    }
  }
}

}  // namespace fused_op::cuda
