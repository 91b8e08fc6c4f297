// Plans of forward of norms over channels: see channels_first.h. Host code without CUDA or torch.
#include <algorithm>
#include <cstdint>

#include "core/pack.h"
#include "cuda/plan.h"
#include "cuda/plan_names.h"

namespace fused_op::cuda {
namespace {

constexpr int kMaxWarps = 16;       // of a group
constexpr int kLeastWarps = 8;      // of a CTA
constexpr int kCtasPerSm = 2;       // wide packs are used only if they leave this many
constexpr int kLeastBytes = 4;      // of a pack, unless addresses allow only fewer
constexpr int kReadAgainBytes = 8;  // of a pack of channels that are not kept
// How many words a thread may keep and compute with, of 128 registers. With 64 registers, kernels
// of some shapes spill.
constexpr int kMostWords = 56;
constexpr int kValues = 4;  // of a pixel, in registers

// The warps of a group. The order of sums follows from them, so they depend on the channels alone.
int warps_of(std::int64_t channels) {
  int warps = 1;
  while (warps < kMaxWarps && channels > 16 * warps) {
    warps *= 2;
  }
  return warps == kMaxWarps && channels <= 192 ? kMaxWarps / 2 : warps;
}

// A call as a plan sees it.
struct Call {
  DType dtype;
  std::int64_t rows;
  std::int64_t channels;
  std::int64_t pixels;
  std::uintptr_t addresses;  // or'ed
};

bool allows(const Call& call, int pack) {
  return call.pixels % pack == 0 &&
         call.addresses % static_cast<std::uintptr_t>(pack * size_of(call.dtype)) == 0;
}
std::int64_t tiles_of(const Call& call, int pack) {
  return call.rows / call.pixels * PixelTile::tiles_of_sample(call.pixels, kWarpSize * pack);
}
bool fits_registers(const Call& call, int pack, int warps) {
  const std::int64_t each = ceil_div(call.channels, warps);
  const int words = std::max(pack * size_of(call.dtype) / 4, 1);
  const int value_words = call.dtype == DType::kFloat64 ? 2 : 1;
  return each * words + kValues * pack * value_words <= kMostWords;
}

ChannelsFirstPlan plan_of(const Call& call, const DeviceInfo& device) {
  ChannelsFirstPlan plan{};
  plan.warps = warps_of(call.channels);
  plan.groups = std::max(kLeastWarps / plan.warps, 1);
  const int size = size_of(call.dtype);
  const auto is_wide = [&](int pack) {
    return !allows(call, pack) ||
           (pack * size > kLeastBytes &&
            tiles_of(call, pack) < std::int64_t{kCtasPerSm} * plan.groups * device.multiprocessors);
  };
  int pack = kVectorBytes / size;
  while (pack > 1 && (is_wide(pack) ||
                      (pack * size > kLeastBytes && !fits_registers(call, pack, plan.warps)))) {
    pack /= 2;
  }
  if (fits_registers(call, pack, plan.warps)) {
    plan.channels = static_cast<int>(call.channels);
  } else {
    pack = std::max(kReadAgainBytes / size, 1);
    while (pack > 1 && is_wide(pack)) {
      pack /= 2;
    }
  }
  plan.pack = pack;
  plan.tiles = tiles_of(call, pack);
  plan.ctas = ceil_div(plan.tiles, plan.groups);
  return plan;
}

std::uintptr_t address(const void* data) { return reinterpret_cast<std::uintptr_t>(data); }

}  // namespace

ChannelsFirstPlan plan_channels_first(const ChannelsFirstForwardArgs& args,
                                      const DeviceInfo& device) {
  return plan_of({.dtype = args.dtype,
                  .rows = args.rows,
                  .channels = args.cols,
                  .pixels = args.pixels,
                  .addresses = address(args.input.data) | address(args.output.data)},
                 device);
}

std::string kernel_name(const ChannelsFirstForwardArgs& args, const ChannelsFirstPlan& plan) {
  return "fused_op::cuda::channels_first_forward_kernel<fused_op::cuda::ChannelsFirstForwardOp" +
         joined({norm_name(args.kind), type(args.dtype), type(args.param_dtype), number(plan.pack),
                 number(plan.warps), number(plan.groups), number(plan.channels), flag(args.silu)}) +
         ">";
}

}  // namespace fused_op::cuda
